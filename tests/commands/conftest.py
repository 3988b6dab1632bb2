"""A machine set up as documented, with stand-ins for what is not available here.

Only external programs and servers are replaced: git, pip, Slurm, the docker engine, registries, and the Python that
trains. Everything else is ftkit's own code.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import socketserver
import ssl
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from waiting import PATIENCE_SECONDS

from ftkit.images.inside import PASSED
from ftkit.runs.records import EndRecord, StartRecord, StepRecord, to_line

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).parents[2]
REGISTRIES = ("ghcr.io", "nvcr.io", "registry-1.docker.io", "registry.example.com")

BASICS = """
basename bash cat chmod cksum cp cut date dirname env false flock grep head id kill ln ls mkdir mktemp mv nproc paste
ps rm sed seq setsid sh sha256sum sleep sort stat tail tee test timeout touch tr true uname wc
"""

PYTHON = """#!/bin/bash
# The Python of a virtual environment; of the programs in it, those that take long only seem to run.
DATA_OF_PLAN='import json, sys; p = json.load(open(sys.argv[1])); print(p["workspace"] + "/data/" + p["fingerprint"])'
case "$*" in
-c*) exec "$REAL_PYTHON" "$@" ;;
--version) echo Python 3.11.0 ;;
"-m venv "*)
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$MACHINE/ftkit" "$3/bin/ftkit"
    printf '#!/bin/bash\\necho "1 passed"\\n' >"$3/bin/pytest"
    chmod +x "$3/bin/pytest"
    echo "PATH=$PWD/$3/bin:\\$PATH" >"$3/bin/activate" ;;
"-m pip "*) ;;
"-m ftkit.data "*) ;;
*"-m ftkit.train "* | *"-m ftkit.train.script_process "*)
    run=$(dirname -- "${!#}")
    for rank in 0 1 2 3; do echo "hello from rank $rank" >"$run/logs/rank-0000$rank.log"; done
    while [[ -e $MACHINE/is-busy && -e /proc/$TESTS ]]; do sleep 0.05; done  # tests that are killed tidy nothing up
    outcome=$(cat "$MACHINE/outcome")
    if [[ -d $MACHINE/export ]]; then
        cp -r "$MACHINE/export" "$run/export"
        data=$("$REAL_PYTHON" -c "$DATA_OF_PLAN" "$run/plan.json")
        mkdir -p "$data" && cp -r "$MACHINE/data/." "$data"
    fi
    cat "$MACHINE/records-$outcome" >>"$run/metrics.jsonl" ;;
*) echo "the stand-in for Python knows nothing of: $*" >&2; exit 1 ;;
esac
"""

FTKIT = """#!{python}
import os, sys, types
from ftkit.runs.certificate import EngineResult
def export_run(layout, folder, *_):
    (folder or layout.exports).mkdir(parents=True, exist_ok=True)
    return folder or layout.exports
sys.modules |= {{  # what loads models
    "ftkit.evaluate.checkpoint_export": types.SimpleNamespace(
        ExportRequest=lambda *request: request[-1], export_run=export_run
    ),
    "ftkit.evaluate.certificate": types.SimpleNamespace(
        certify=lambda name, *_: EngineResult(name, "1", "bf16", (), ()), held_out=lambda _: {{}},
        chosen_engines=lambda names, _: [name for name in names if name not in ("auto", "transformers")],
    ),
    "ftkit.evaluate.verify_export": types.SimpleNamespace(
        read_record=lambda *_: types.SimpleNamespace(run="demo", step=9, kind="model", precision="bf16"),
        require_passed=lambda *_: None, verify_export=lambda *_: [], base_of=None,
    ),
}}
sys.executable = os.environ["MACHINE"] + "/bin/python3"  # the Python that trains
from ftkit.cli.main import main
sys.exit(main())
"""

STAND_INS = {
    "git": """
[[ $1 == clone ]] || exit 1
folder=ftkit && [[ $# == 3 ]] && folder=$3
mkdir -p "$folder" && cp -r "$CHECKOUT/scripts" "$CHECKOUT/pyproject.toml" "$CHECKOUT"/constraints-*.txt "$folder"
""",
    # `sbatch --wrap` runs the job immediately, with the node's programs. Other jobs have finished by the time
    # that squeue is called.
    "sbatch": """
for word in "$@"; do
    case $word in
    --output=*) log=${word#*=} ;;
    --wrap=*) PATH=$MACHINE/node:$PATH HOSTNAME=n1 exec bash -c "${word#*=}" >"$log" 2>&1 ;;
    esac
done
[[ -f ${!#} ]] || exit 1
echo "$PWD" >"$MACHINE/job"
[[ -e $MACHINE/is-busy ]] || python3 -m ftkit.train "$PWD/plan.json"
echo 123456
""",
    "squeue": """
[[ -f $MACHINE/job ]] || exit 0
state=COMPLETED && [[ -e $MACHINE/is-busy ]] && state=RUNNING
echo "123456|$state|None|1767323100|1767326700|n[1-2]|$(cat "$MACHINE/job")"
""",
    "scancel": """rm "$MACHINE/is-busy" """,
    "sacct": "",
    # Used for pages and commands about a login node.
    "sinfo": """
if [[ $1 == --version ]]; then echo "slurm 24.11.1"
elif [[ $* != *%P* ]]; then echo "gpu* 1-00:00:00 8 gpu:8"
elif [[ -e $MACHINE/is-login-node ]]; then echo "gpu*|up|8|96|gpu:8|1-00:00:00|1"; fi
""",
    "srun": """[[ $1 == --help ]] && echo "      --container-image=IMAGE" """,
    "scontrol": """echo "ClusterName = ours" """,
    "less": "exec cat",
    "jq": """exec "$REAL_PYTHON" -c 'import json, sys; print(json.load(sys.stdin))' """,
    "uv": """printf 'left-pad==1.0 \\\\\\n    --hash=sha256:%064d\\n' 0""",
    "apptainer": f"""echo "{PASSED}" """,
    # Only the header of a squashfs file.
    "tar2sqfs": """
cat >/dev/null
exec "$REAL_PYTHON" -c 'import struct, sys
open(sys.argv[1], "wb").write(struct.pack("<4sIIIIHHHHHHQQQQQQQQ", b"hsqs", *[0] * 11, 96, *[0] * 6))' "${!#}"
""",
}


ON_NODES = {
    "enroot": """
[[ $1 == version ]] && exec echo 4.1.2
cp "$MACHINE"/blobs/* "$ENROOT_CACHE_PATH"
tar2sqfs "$3" </dev/null
""",
    "zstd": """cat "${!#}" """,  # blobs are not compressed
}


@dataclass
class Machine:
    """A home folder with a project, and the programs on PATH."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def project(self) -> Path:
        """The folder in which commands run."""
        return self.root / "home" / "project"

    def as_here(self, text: str) -> str:
        """Replace paths of the cluster's shared file system by a folder of this machine."""
        return text.replace("/shared", f"{self.root}/shared")

    def write(self, path: str, text: str) -> None:
        """Write a file in the project."""
        file = self.project / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.as_here(text))

    def type(self, *lines: str) -> subprocess.CompletedProcess[str]:
        """Run lines in one shell, which exits at the first failure."""
        script = "".join(
            f"{line}\n" + 'code=$?; [ "$code" = 0 ] || exit "$code"\n' for line in map(self.as_here, lines)
        )
        return subprocess.run(
            ["bash", "-c", f"set -o pipefail\n{script}"],
            cwd=self.project,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path, docker_host: str, proxy: tuple[str, Path], exported: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    for folder in ("bin", "node", "blobs", "shared", "home/project", "home/.config/fish/completions"):
        (tmp_path / folder).mkdir(parents=True)
    for name in BASICS.split():
        found = shutil.which(name)
        assert found, f"{name} is not on PATH"
        (tmp_path / "bin" / name).symlink_to(found)
    wrapper = FTKIT.format(python=sys.executable)
    scripts = {name: f"#!/bin/bash\n{script.strip()}\n" for name, script in STAND_INS.items()}
    for name, text in {**scripts, "python3": PYTHON, "ftkit": wrapper, "../ftkit": wrapper}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    for name, script in ON_NODES.items():
        (tmp_path / "node" / name).write_text(f"#!/bin/bash\n{script.strip()}\n")
        (tmp_path / "node" / name).chmod(0o755)
    for blob, content in ((CONFIGURATION, CONFIGURATION), (LAYER, ROOT)):
        (tmp_path / "blobs" / digest(blob).removeprefix("sha256:")).write_bytes(content)
    (tmp_path / "outcome").write_text("completed")
    for outcome in ("completed", "stopped"):
        (tmp_path / f"records-{outcome}").write_text(records(outcome))
    shutil.copytree(CHECKOUT / "containers", machine.project / "containers")  # image locks are written there
    cache_config(tmp_path / "shared" / "me" / "ftkit" / "huggingface" / "hub")
    machine.environment = {
        "HOME": f"{tmp_path}/home",
        "PATH": f"{tmp_path}/bin",
        "MACHINE": str(tmp_path),
        "TESTS": str(os.getpid()),
        "CHECKOUT": str(CHECKOUT),
        "EXPORTED": str(exported),
        "REAL_PYTHON": sys.executable,
        "DOCKER_HOST": docker_host,
        "HTTPS_PROXY": proxy[0],
        "REQUESTS_CA_BUNDLE": str(proxy[1]),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens there: no test contacts the real hub
        "TOKEN": "secret",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "80",
    }
    yield machine
    (tmp_path / "is-busy").unlink(missing_ok=True)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for an export, which the first test of all workers that needs one writes."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "exported"
    folder.mkdir(exist_ok=True)
    return folder


def cache_config(hub: Path) -> None:
    """Cache the configuration of the documented model, as after a first request to the hub."""
    shape = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    model = hub / "models--Qwen--Qwen3-8B"
    for folder in ("refs", "snapshots/1a2b"):
        (model / folder).mkdir(parents=True)
    (model / "refs" / "main").write_text("1a2b")
    (model / "snapshots" / "1a2b" / "config.json").write_text(json.dumps(shape))


def records(outcome: Any) -> str:
    step = StepRecord(
        time=1.0, step=10, num_steps=10, loss=1.0, epoch=1.0, learning_rate=1e-3, grad_norm=1.0, tokens=100, targets=50,
        tokens_per_second=10.0, step_seconds=0.1, overhead_ratio=0.0, data_wait_ratio=0.0, mfu=None, memory_gib=None,
    )  # fmt: skip
    end = EndRecord(time=time.time() + 3600, outcome=outcome, step=10, training_seconds=1.0, export=None)
    start = StartRecord(0.5, 10, 0, 2, "fsdp2", "cpu", 951680, {})
    return "".join(f"{to_line(record)}\n" for record in (start, step, end))


# --- Images ----------------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def archive() -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name in ("etc", "etc/issue"):
            member = tarfile.TarInfo(name)
            member.type, member.mode = (tarfile.DIRTYPE, 0o755) if name == "etc" else (tarfile.REGTYPE, 0o644)
            tar.addfile(member)
    return output.getvalue()


ROOT = archive()
LAYER = gzip.compress(ROOT, mtime=0)
CREATED = "2026-01-02T03:04:05Z"
CONFIGURATION = json.dumps(
    {"architecture": "amd64", "os": "linux", "created": CREATED, "config": {"Labels": {}},
     "rootfs": {"type": "layers", "diff_ids": [digest(ROOT)]}}
).encode()  # fmt: skip
OCI = "application/vnd.oci.image"
MANIFEST = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": {"mediaType": f"{OCI}.config.v1+json", "digest": digest(CONFIGURATION), "size": len(CONFIGURATION)},
        "layers": [{"mediaType": f"{OCI}.layer.v1.tar+gzip", "digest": digest(LAYER), "size": len(LAYER)}],
    }
).encode()


class Handler(BaseHTTPRequestHandler):
    """HTTP handler that responds through a method `answer(method, path, query, body)`."""

    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "here"  # Unix socket clients have no address

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = iter(lambda: self.rfile.read(int(self.rfile.readline(), 16) + 2)[:-2], b"")
            body = b"".join(chunks)
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        code, data, kind = self.answer(self.command, unquote(url.path), parse_qs(url.query), body)
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(BrokenPipeError):  # clients may disconnect early
                self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815 - http.server's names

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes, str]:
        raise NotImplementedError


class Engine(Handler):
    """The subset of the docker engine's API that ftkit uses; images are stored by name."""

    images: dict[str, dict[str, Any]]

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes, str]:
        path = re.sub(r"^/v[\d.]+", "", path)
        first = {key: values[0] for key, values in query.items()}
        words = path.strip("/").split("/")
        if path == "/version":
            return self.json({"ApiVersion": "1.44", "Version": "27.0"})
        if path == "/build":
            return self.build(body)
        if path == "/images/create":
            name, wanted = first["fromImage"], first["tag"]
            image = self.image(digest(name.encode()), {}, [f"{name}@{wanted}"])
            self.images |= {f"{name}@{wanted}": image, image["Id"]: image}
            return self.json({"status": "done"})
        if words[0] == "images" and path != "/images/json":
            return self.of_image(words[-1], "/".join(words[1:-1]), first)
        if words[0] == "containers" and path != "/containers/json":
            return self.of_container(method, words[-1])
        return self.json([])

    def of_image(self, verb: str, name: str, query: dict[str, str]) -> tuple[int, bytes, str]:
        whole = f"{name}:{query['tag']}" if verb == "push" else name
        if whole not in self.images:
            return self.json({"message": f"No such image: {whole}"}, 404)
        if verb == "tag":
            self.images[f"{query['repo']}:{query['tag']}"] = self.images[name]
        if verb == "push":
            self.images[whole]["RepoDigests"].append(f"{name}@{digest(MANIFEST)}")
            return self.json({"aux": {"Tag": query["tag"], "Digest": digest(MANIFEST), "Size": 1}})
        return self.json(self.images[name])

    def of_container(self, method: str, verb: str) -> tuple[int, bytes, str]:
        said = f"{PASSED}\n".encode()
        raw = {"logs": struct.pack(">BxxxI", 1, len(said)) + said, "export": ROOT}
        if verb in raw:
            return 200, raw[verb], "application/octet-stream"
        if method == "DELETE" or verb == "start":
            return 204, b"", "text/plain"
        known = {"create": {"Id": "c1"}, "wait": {"StatusCode": 0}}
        return self.json(known.get(verb, {"Config": {"Tty": False}}))

    def build(self, context: bytes) -> tuple[int, bytes, str]:
        with tarfile.open(fileobj=io.BytesIO(context)) as tar:
            lines = tar.extractfile("Dockerfile").read().decode().splitlines()  # type: ignore[union-attr]
        labels = dict(
            re.findall(r'(\S+)="((?:[^"\\]|\\.)*)"', next(line for line in lines if line.startswith("LABEL ")))
        )
        image = self.image(digest(context), labels, [])
        self.images[image["Id"]] = image
        return self.json({"aux": {"ID": image["Id"]}})

    def image(self, image_id: str, labels: dict[str, str], repo_digests: list[str]) -> dict[str, Any]:
        config = {"Labels": labels, "Env": [], "Cmd": ["bash"]}
        return {"Id": image_id, "Size": 10, "Created": CREATED, "RepoDigests": repo_digests, "Config": config}

    def json(self, values: object, code: int = 200) -> tuple[int, bytes, str]:
        return code, json.dumps(values).encode() + b"\n", "application/json"


class Proxy(Handler):
    """A proxy to all registries, each of which has the same image under every name."""

    context: ssl.SSLContext

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.connection = self.context.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb", -1), self.connection.makefile("wb", 0)  # type: ignore[assignment]
        self.close_connection = False

    def finish(self) -> None:
        super().finish()
        self.connection.close()

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes, str]:
        del method, query, body
        if "/manifests/" in path:
            return 200, MANIFEST, f"{OCI}.manifest.v1+json"
        blobs = {digest(blob): blob for blob in (LAYER, CONFIGURATION)}
        return 200, blobs[path.rpartition("/")[2]], "application/octet-stream"


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class TcpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def docker_host() -> Iterator[str]:
    """The address of a docker engine without images."""
    with tempfile.TemporaryDirectory(prefix="ftkit-") as folder:  # a short path: socket paths have at most 107 bytes
        engine = type("EngineOfATest", (Engine,), {"images": {}})
        with serving(UnixServer(f"{folder}/docker.sock", engine)):
            yield f"unix://{folder}/docker.sock"


@pytest.fixture(scope="session")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A proxy to the registries, and their certificate."""
    folder = tmp_path_factory.mktemp("certificate")
    names = ",".join(f"DNS:{name}" for name in REGISTRIES)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-keyout", "key.pem", "-out", "certificate.pem", "-subj", "/CN=stand-in",
         "-addext", f"subjectAltName={names}"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    server = TcpServer(("127.0.0.1", 0), type("ProxyOfTests", (Proxy,), {"context": context}))
    with serving(server):
        yield f"http://127.0.0.1:{server.server_address[1]}", folder / "certificate.pem"
