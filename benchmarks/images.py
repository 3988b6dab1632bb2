"""Benchmark ways to make a squashfs file from an image, alternating in one run.

    python benchmarks/images.py                    on a root file system of about 1.5 GB, made of this machine's files
    python benchmarks/images.py --image NAME       on an image of the docker engine
    python benchmarks/images.py --unchanged NAME:TAG
                 instead: repeat build, push and import in a project where all three are up to date

Needs a docker engine, squashfs-tools and squashfs-tools-ng. Without enroot on the machine, its steps run with its
default options: export, unpack, mksquashfs with lzo and uncompressed data.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from recording import add_record_option, record_repeats

from ftkit.images import docker_engine
from ftkit.images.image_store import ImageStore
from ftkit.images.import_image import docker_source, import_image

ROOT_BYTES = 1_500_000_000
NAME = "ftkit-benchmark:1"
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """The measurement of one method."""

    way: str
    seconds: float
    size: int


def make_image() -> None:
    """Make an image from this machine's programs and libraries."""
    with tempfile.TemporaryFile() as file:
        size = 0
        with tarfile.open(fileobj=file, mode="w") as tar:
            for folder in (Path(sys.prefix), Path("/usr/lib"), Path("/usr/share"), Path("/usr/bin")):
                for path in sorted(folder.rglob("*")):
                    if path.is_symlink() or not path.is_file() or size >= ROOT_BYTES:
                        continue
                    size += path.stat().st_size
                    tar.add(path, recursive=False)
        file.seek(0)
        with docker_engine.connect() as client:
            name, _, tag = NAME.partition(":")
            client.import_image_from_data(file, repository=name, tag=tag)


def ftkit_way(image: str, folder: Path) -> Row:
    """Import with ftkit, including digests."""
    with docker_engine.connect() as client:
        found = docker_engine.inspect_required(client, image, "name another")
    started = time.monotonic()
    imported = import_image("benchmark:1", docker_source(image, found), ImageStore(folder / "images"))
    return Row("ftkit import", time.monotonic() - started, imported.manifest.size)


def enroot_way(image: str, folder: Path, root: Path) -> Row:
    """Import with enroot's defaults; leave the unpacked files in `root`."""
    output = folder / "enroot.sqsh"
    started = time.monotonic()
    if shutil.which("enroot"):
        run("enroot", "import", "--output", str(output), f"dockerd://{image}")
        seconds = time.monotonic() - started
        unpack(image, root)
        return Row("enroot import, defaults", seconds, output.stat().st_size)
    unpack(image, root)
    run("mksquashfs", str(root), str(output), "-all-root", "-comp", "lzo", "-noD", "-no-progress", "-quiet")
    return Row("enroot's steps run manually, its defaults", time.monotonic() - started, output.stat().st_size)


def unpack(image: str, root: Path) -> None:
    """Unpack an image's export."""
    root.mkdir()
    with docker_engine.connect() as client, docker_engine.exported(client, image) as stream:
        tar = subprocess.Popen(["tar", "-xf", "-", "-C", str(root), "--exclude=dev/*"], stdin=subprocess.PIPE)
        with tar:
            shutil.copyfileobj(stream, tar.stdin, MIB)


def mksquashfs_way(way: str, root: Path, folder: Path, *options: str) -> Row:
    """Pack unpacked files; the time does not include unpacking."""
    output = folder / f"{way.replace(' ', '-')}.sqsh"
    started = time.monotonic()
    run("mksquashfs", str(root), str(output), "-all-root", "-no-progress", "-quiet", *options)
    return Row(way, time.monotonic() - started, output.stat().st_size)


def run(*command: str) -> None:
    """Run a program that must not fail."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class PeakMemory:
    """The peak of the total memory of this process and its children."""

    def __init__(self) -> None:
        self.mib = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        page = resource.getpagesize()
        while not self._ends.wait(0.02):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
            total = 0
            for pid in ("self", *children):
                try:
                    total += int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * page
                except OSError:
                    continue
            self.mib = max(self.mib, total / MIB)

    def end(self) -> float:
        """Stop watching."""
        self._ends.set()
        self._thread.join()
        return self.mib


def one_round(image: str) -> tuple[list[Row], float]:
    """Run each method once, in sequence; also return ftkit's peak memory."""
    with tempfile.TemporaryDirectory(prefix="ftkit-benchmark-") as place:
        folder = Path(place)
        memory = PeakMemory()
        ours = ftkit_way(image, folder)
        peak = memory.end()
        root = folder / "root"
        enroot = enroot_way(image, folder, root)
        gzip = mksquashfs_way("mksquashfs gzip", root, folder, "-comp", "gzip")
        dense = mksquashfs_way("mksquashfs zstd-15", root, folder, "-comp", "zstd", "-Xcompression-level", "15")
    return [ours, enroot, gzip, dense], peak


def show(rounds: list[list[Row]], peak: float) -> bool:
    """Print a table with the targets; return whether all were met."""
    medians = [
        Row(rows[0].way, statistics.median(row.seconds for row in rows), rows[0].size)
        for rows in zip(*rounds, strict=True)
    ]
    print(f"medians of {len(rounds)}; CPUs: {os.cpu_count()}, load now: {os.getloadavg()[0]:.1f}")
    print(f"{'way':40} {'seconds':>8} {'MiB':>7}")
    for row in medians:
        print(f"{row.way:40} {row.seconds:8.1f} {row.size / MIB:7.0f}")
    ours, enroot, gzip, dense = medians
    times, longer = enroot.seconds / ours.seconds, gzip.seconds / ours.seconds
    larger = 100 * (ours.size / dense.size - 1)
    print(f"{times:.1f} x faster than enroot's defaults (wanted: 3), {longer:.1f} x than gzip (wanted: 5)")
    print(f"{larger:+.1f}% larger than zstd-15 (wanted: at most 5), peak memory {peak:.0f} MiB (wanted: under 1024)")
    return times >= 3 and longer >= 5 and larger <= 5 and peak < 1024  # noqa: PLR2004


def show_unchanged(reference: str, repeats: int, record: Path | None) -> bool:
    """Time up-to-date commands through the command line."""
    slowest, found = 0.0, {}
    for words in (("build", reference, "--allow-unpinned"), ("push", reference), ("import", reference)):
        seconds = []
        for _ in range(repeats):
            started = time.monotonic()
            run(sys.executable, "-m", "ftkit", *words)
            seconds.append(time.monotonic() - started)
        print(f"ftkit {words[0]:8} {statistics.median(seconds):6.2f} s (wanted: under 2)")
        slowest = max(slowest, statistics.median(seconds))
        found[f"ftkit {words[0]}"] = {"seconds": seconds}
    record_repeats(record, "images-unchanged", found)
    return slowest < 2  # noqa: PLR2004


def main() -> int:
    """Run all measurements and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", help="an image of the docker engine")
    parser.add_argument("--unchanged", metavar="NAME:TAG", help="an image that was built, pushed and imported")
    parser.add_argument("--repeats", type=int, default=3, help="number of rounds for the medians")
    add_record_option(parser)
    options = parser.parse_args()
    if options.unchanged:
        return 0 if show_unchanged(options.unchanged, options.repeats, options.record) else 1
    if options.image is None:
        make_image()
    measured = [one_round(options.image or NAME) for _ in range(options.repeats)]
    ways = {
        rows[0].way: {"seconds": [row.seconds for row in rows], "MiB": [row.size / MIB for row in rows]}
        for rows in zip(*(rows for rows, _ in measured), strict=True)
    }
    record_repeats(options.record, "images", ways)
    return 0 if show([rows for rows, _ in measured], max(peak for _, peak in measured)) else 1


if __name__ == "__main__":
    sys.exit(main())
