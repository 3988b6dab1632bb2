"""`ftkit data`: trained samples, statistics, and every invalid row, through the command line."""

from __future__ import annotations

import html
import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.cli.main import main
from ftkit.cli.terminal.format import printable
from ftkit.data.prepared_data import PreparedData

if TYPE_CHECKING:
    from pathlib import Path

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <|im_end|>?"},
    {"role": "assistant", "content": "A token.", "reasoning_content": "Easy."},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4"},
]
REWRITING = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
    "{% if turn.reasoning_content and loop.last %}<think>{{ turn.reasoning_content }}</think>{% endif %}"
    "{{ turn.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def _in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


def call(capsys: pytest.CaptureFixture[str], command: str, file: Path, *words: str) -> tuple[int, str, str]:
    source = f"data.source={{kind: files, train: {file}}}"
    small = ("data.format=auto", "data.chat_template=chatml", "evaluation.generation=null")
    code = main(["data", command, "demo", source, *small, *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_options_that_the_chat_template_never_reads_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "chats.jsonl", {"messages": TALK})
    code, _, err = call(capsys, "check", file, "data.template_options={enable_thinkin: false}")
    assert code == 0
    assert "never reads enable_thinkin;" in " ".join(err.split())


def test_a_sample_is_shown_turn_by_turn_with_the_trained_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "chats.jsonl", {"messages": TALK})
    code, out, err = call(capsys, "show", file)
    assert code == 0
    assert "format: openai turns" in err
    assert "trained: assistant turns" in err
    title, *lines = out.splitlines()
    assert title.startswith(f"{file}:1: ")
    assert [line.rstrip() for line in lines if line] == [
        "system     <|im_start|>system↵",
        "           Be brief.<|im_end|>↵",
        "user       <|im_start|>user↵",
        "           What is <|im_end|>?<|im_end|>↵",
        "assistant  <|im_start|>assistant↵",
        "           ⟦<think>↵",
        "           Easy.↵",
        "           </think>↵",
        "           ↵",
        "           A token.<|im_end|>⟧↵",
        "user       <|im_start|>user↵",
        "           And 2+2?<|im_end|>↵",
        "assistant  <|im_start|>assistant↵",
        "           ⟦4<|im_end|>⟧",
    ]


def test_the_page_of_samples_has_each_token_with_its_id_and_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = "naïve <script>alert(1)</script> 🤖\u202e done"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    file, page = write(tmp_path / "chats.jsonl", {"messages": talk}), tmp_path / "samples.html"
    code, out, _ = call(capsys, "show", file, "--html", str(page))
    assert (code, out) == (0, "samples.html\n")
    text = page.read_text()
    assert "<script" not in text
    tokens = re.findall(r'<span class="token( trained)?" title="([\d, ]+)">(.*?)</span>', text, re.DOTALL)
    shown = "".join(html.unescape(token) for _, _, token in tokens)
    assert shown == (
        f"<|im_start|>user↵\nhi<|im_end|>↵\n<|im_start|>assistant↵\n{printable(answer)}<|im_end|>↵\n".removesuffix(
            "↵\n"
        )
    )
    trained = "".join(html.unescape(token) for is_trained, _, token in tokens if is_trained)
    assert trained == f"{printable(answer)}<|im_end|>"
    num_tokens = sum(len(ids.split(",")) for _, ids, _ in tokens)
    assert f": {num_tokens} tokens" in text
    assert re.findall(r"<dt>(.*?)</dt>", text) == ["user", "assistant"]
    code, _, err = call(capsys, "show", file, "--html", str(tmp_path / "missing" / "x.html"))
    assert (code, "--html" in err) == (5, True)


def test_each_rendering_of_a_template_that_rewrites_turns_is_shown_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ftkit.data.tokenizers import learn_tokenizer

    tokenizer = learn_tokenizer(["what"], 300, "chatml")
    tokenizer.chat_template = REWRITING
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = write(tmp_path / "chats.jsonl", {"messages": TALK})
    own = (f"model.tokenizer={{source: {tmp_path}/tokenizer, vocab_size: null}}", "data.chat_template=model")
    code, out, err = call(capsys, "show", file, *own, "training.sequence_length=40", "data.too_long=drop")
    assert code == 0
    assert "rewrites earlier turns" in err
    assert "document 1 of 2" in out
    assert "document 2 of 2" in out
    assert "⟦<think>Easy.</think>A token.<|im_end|>⟧" in out
    assert "longer than sequence_length 40: dropped" in out
    code, out, _ = call(capsys, "show", file, *own, "--json")
    samples = json.loads(out)
    trained = ["".join(s["text"] for s in sample["segments"] if s["is_trained"]) for sample in samples]
    assert trained == ["<think>Easy.</think>A token.<|im_end|>", "4<|im_end|>"]
    assert {segment["role"] for segment in samples[1]["segments"]} == {"system", "user", "assistant"}


def test_an_answer_without_its_former_thoughts_is_shown_as_the_assistants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ftkit.data.tokenizers import learn_tokenizer

    tokenizer = learn_tokenizer(["what"], 300, "chatml")
    tokenizer.chat_template = REWRITING.replace(
        "{{ turn.content }}", "{{ turn.content if loop.last else turn.content.split('</think>')[-1] | trim }}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    answer = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    turns = [{"role": "user", "content": "One?"}, answer, {"role": "user", "content": "Two?"}, answer]
    file = write(tmp_path / "chats.jsonl", {"messages": turns})
    own = (f"model.tokenizer={{source: {tmp_path}/tokenizer, vocab_size: null}}", "data.chat_template=model")
    _, out, _ = call(capsys, "show", file, *own, "--json")
    shown = [(segment["role"], segment["text"]) for segment in json.loads(out)[1]["segments"]]
    assert [role for role, text in shown if "yes" in text or "Two" in text] == ["assistant", "user", "assistant"]


def test_turns_have_their_roles_if_the_tokenizer_normalizes_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import normalizers

    from ftkit.data.tokenizers import learn_tokenizer

    tokenizer = learn_tokenizer(["what"], 300, "chatml")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    turns = [{"role": "user", "content": "re\u0301sume\u0301"}, {"role": "assistant", "content": "fine"}]
    file = write(tmp_path / "chats.jsonl", {"messages": turns})
    own = (f"model.tokenizer={{source: {tmp_path}/tokenizer, vocab_size: null}}", "data.chat_template=model")
    _, out, _ = call(capsys, "show", file, *own, "--json")
    shown = [(segment["role"], segment["text"]) for segment in json.loads(out)[0]["segments"]]
    assert [role for role, text in shown if "résumé" in text or "fine" in text] == ["user", "assistant"]


def test_plain_text_is_shown_in_full_with_how_it_is_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "texts.jsonl", {"text": "Once upon a time. " * 30})
    code, out, err = call(capsys, "show", file, "training.sequence_length=64", "data.too_long=split")
    assert code == 0
    assert "trained: all tokens" in err
    assert "sequence_length 64: split, 64 and" in out
    assert out.rstrip().endswith("<|im_end|>⟧")


def test_long_texts_are_split_by_default_and_long_conversations_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write(tmp_path / "texts.jsonl", {"text": "ha" + " ha" * 300})
    length = "training.sequence_length=64"
    code, _, err = call(capsys, "check", texts, length)
    assert code == 0
    assert "1 document longer than a pack: 1 split" in err
    chats = write(tmp_path / "chats.jsonl", {"messages": TALK})
    mixture = f"data.source=[{texts}, {chats}]"
    code, out, _ = call(capsys, "stats", texts, mixture, length, "--json")
    stats = json.loads(out)
    assert (code, stats["too_long"], stats["num_too_long"]) == (0, "split, error", 2)
    assert stats["longest"] == 64 < stats["longest_rendering"]
    assert stats["num_duplicates"] == 0  # its equal parts are of one row
    assert stats["sources"][0]["num_documents"] > 1
    assert stats["sources"][1]["num_documents"] == 0
    assert [source["num_train_rows"] for source in stats["sources"]] == [1, 0]
    code, out, _ = call(capsys, "check", texts, mixture, length)
    assert code == 8
    assert f"{chats}:1" in out
    assert f"{texts}:1" not in out


def test_documents_of_which_no_turn_fits_count_as_dropped_and_not_as_truncated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = [{"role": "user", "content": "ha " * 300}, TALK[-1]]
    file = write(tmp_path / "chats.jsonl", {"messages": TALK[:3] + long}, {"messages": long}, {"messages": TALK[:3]})
    (tmp_path / "ftkit.yaml").write_text("workspace: ./work\n")
    settings = ("training.sequence_length=128", "data.too_long=truncate", "--cluster", "local")
    code, _, err = call(capsys, "check", file, *settings)
    assert code == 0, err
    assert "3 rows; 2 documents longer than a pack: 1 truncated, 1 dropped" in " ".join(err.split())
    assert json.loads(call(capsys, "stats", file, *settings, "--json")[1])["too_long"] == "truncate"
    code, _, err = call(capsys, "prepare", file, *settings)
    assert code == 0, err
    assert "2 documents longer than a pack: 1 truncated, 1 dropped" in " ".join(err.split())
    (folder,) = (tmp_path / "work" / "data").iterdir()
    assert PreparedData(folder).read_manifest().too_long == {"truncate": 1, "drop": 1}


def test_validation_documents_that_are_trained_on_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = {"messages": TALK}, {"messages": TALK[:1] + TALK[3:]}
    held_out = write(tmp_path / "validation.jsonl", one, one, two)
    words = (write(tmp_path / "chats.jsonl", one), f"data.validation.file={held_out}")
    assert "; 2 validation documents also trained on" in call(capsys, "stats", *words)[1]
    assert "; 2 validation documents also trained on, which lowers the loss\n" in call(capsys, "check", *words)[2]
    assert json.loads(call(capsys, "stats", *words, "--json")[1])["num_in_both"] == 2


def test_validation_pairs_that_are_trained_on_are_counted_and_are_no_duplicates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "q", "chosen": chosen, "rejected": "b"} for chosen in "acd"]
    held_out = write(tmp_path / "validation.jsonl", rows[0], {"prompt": "q", "chosen": "e", "rejected": "b"})
    words = (write(tmp_path / "pairs.jsonl", *rows), f"data.validation.file={held_out}", "training.objective=dpo")
    assert "0; 1 validation pair also trained on" in call(capsys, "stats", *words)[1]
    stats = json.loads(call(capsys, "stats", *words, "--json")[1])
    assert [stats[name] for name in ("num_in_both", "num_duplicates", "num_validation")] == [1, 0, 4]


def test_statistics_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [{"messages": TALK}] * 3 + [{"messages": TALK[:1] + TALK[3:]}, {"messages": TALK[:2]}]
    file = write(tmp_path / "chats.jsonl", *rows)
    code, out, _ = call(capsys, "stats", file, "data.skip_bad=1", "training.sequence_length=80", "data.too_long=drop",
                        "--json")  # fmt: skip
    assert code == 0
    stats = json.loads(out)
    assert (stats["sources"][0]["num_rows"], stats["num_bad"], stats["num_duplicates"]) == (4, 1, 0)
    assert (stats["num_renderings"], stats["num_too_long"], stats["num_documents"]) == (4, 3, 1)
    assert sum(each["count"] for each in stats["histogram"]) == 1
    assert (stats["num_packs"], stats["epoch"]["steps"]) == (1, 1)
    assert stats["num_tokens"] == pytest.approx(stats["fill_ratio"] * 80)
    code, out, _ = call(capsys, "stats", file, "data.skip_bad=1")
    assert code == 0
    assert "rows        4; 1 skipped" in out
    assert "duplicates  2" in out
    assert "epoch       less than" in out
    assert max(map(len, out.splitlines())) <= 80


def test_rows_and_tokens_of_a_source_are_of_its_training_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"messages": TALK}
    for name in "ab":
        (tmp_path / name).mkdir()
    files = [write(tmp_path / name / "rows.jsonl", *[row] * number) for name, number in (("a", 30), ("b", 10))]
    mixed = json.dumps([str(file) for file in files])
    words = (files[0], f"data.source={mixed}", "data.validation={count: 8}")
    stats = json.loads(call(capsys, "stats", *words, "--json")[1])
    tokens = [source["num_tokens"] for source in stats["sources"]]
    rows = [source["num_train_rows"] for source in stats["sources"]]
    assert (sum(rows), sum(source["num_rows"] for source in stats["sources"])) == (32, 40)
    assert tokens == [number * sum(tokens) / 32 for number in rows]
    lines = call(capsys, "stats", *words)[1].splitlines()
    shown = [line.split()[:2] for line in lines if line.startswith("rows.jsonl")]
    assert shown == [[f"rows.jsonl.{place}", str(number)] for place, number in enumerate(rows)]


def test_each_invalid_row_is_printed_with_its_location_and_the_exit_code_is_8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(
        tmp_path / "chats.jsonl",
        {"messages": TALK},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "mood": 1}]},
        {"messages": TALK[:2]},
    )
    code, out, err = call(capsys, "check", file)
    assert code == 8
    assert [line.split(":")[0] for line in out.splitlines() if not line.startswith(" ")] == ["1 row", "1 row"]
    assert {line.strip() for line in out.splitlines() if str(file) in line} == {f"{file}:2", f"{file}:3"}
    assert "error: 2 of 3 rows" in err
    code, out, _ = call(capsys, "check", file, "--skip-bad", "2", "--json")
    assert code == 0
    assert sorted(each["where"] for each in json.loads(out)["bad"]) == [f"{file}:2", f"{file}:3"]
    assert json.loads(out)["rows"] == 3


def test_rows_with_an_empty_list_of_turns_are_not_counted_with_rows_without_a_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: list[object] = [[], "[]", None, 3, None]
    file = write(tmp_path / "chats.jsonl", *[{"messages": TALK}] * 6, *({"messages": each} for each in bad))
    _, out, _ = call(capsys, "check", file)
    kinds = [line for line in out.splitlines() if not line.startswith(" ")]
    assert [(line.split(":")[0], "empty list" in line) for line in kinds] == [("2 rows", True), ("3 rows", False)]


def test_rows_with_the_same_problem_are_counted_and_three_of_them_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [[{"role": "user", "content": f"q{number}"}] for number in range(5)]
    file = write(tmp_path / "chats.jsonl", {"messages": TALK}, *({"messages": each} for each in turns))
    _, out, _ = call(capsys, "check", file)
    assert out.startswith("5 rows: ")
    assert sum(str(file) in line for line in out.splitlines()) == 3
    _, out, _ = call(capsys, "check", file, "--all")
    assert [line.strip() for line in out.splitlines() if str(file) in line] == [
        f"{file}:{line}" for line in range(2, 7)
    ]


def test_malformed_rows_and_rows_of_another_schema_are_each_reported_or_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.data.encoding.MAX_CHARACTERS", 5000)
    good = json.dumps({"messages": TALK}).encode()
    bad = {
        b"\0\0": "not valid JSON",
        '{"messages": "caf\u00e9"}'.encode("latin-1"): "not UTF-8: byte 0xe9",
        b'{"text": "another", "label": 1}': "no column 'messages': the row has text, label",
        json.dumps({"messages": [{"role": "user", "content": "x" * 6000}, TALK[2]]}).encode(): "a text of 6,",
        json.dumps({"messages": TALK, "tools": [{"type": "function"}]}).encode(): "a tool has no schema with a name",
    }
    file = tmp_path / "chats.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b"\n".join([good, *bad, good.replace(b"2+2", b"\\u0000")]))
    code, out, err = call(capsys, "check", file, "--json")
    assert code == 8, err
    assert out, err
    found = json.loads(out)
    assert found["rows"] == 7
    assert [each["where"] for each in found["bad"]] == [f"{file}:{line}" for line in range(2, 7)]
    for each, reason in zip(found["bad"], bad.values(), strict=True):
        assert each["reason"].startswith(reason)
    code, _, err = call(capsys, "stats", file, "data.skip_bad=2")
    assert (code, f"error: {file}:4: " in err, "data.skip_bad=N" in err) == (8, True, True)
    code, out, _ = call(capsys, "stats", file, "data.skip_bad=5", "--json")
    assert (code, json.loads(out)["num_bad"]) == (0, 5)


def test_validation_reports_that_all_rows_are_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.data.inspection._REPORT_SECONDS", 0)
    code, out, err = call(capsys, "check", write(tmp_path / "chats.jsonl", {"messages": TALK}))
    assert (code, out) == (0, "")
    assert "1 row so far" in err
    assert "1 row: all" in err


def test_a_sample_of_a_tokenizer_with_a_prefix_space_is_shown_as_it_is_rendered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate("▁[/]INSTabcdefghijklmnopqrstuvwxyz", start=3)}
    backend = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1, "<unk>": 2, **letters}, merges=[], unk_token="<unk>"))  # noqa: S106
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")  # noqa: S106
    tokenizer.chat_template = (
        "<s>{% for turn in messages %}{% if turn.role == 'user' %}[INST] {{ turn.content }} [/INST]"
        "{% else %} {{ turn.content }}</s>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    talk = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "it is"}]
    source = f"model.tokenizer={{source: {tmp_path}/tokenizer, vocab_size: null}}"
    code, out, err = call(
        capsys, "show", write(tmp_path / "chats.jsonl", {"messages": talk}), source, "data.chat_template=model"
    )
    assert code == 0, err
    assert [line.rstrip() for line in out.splitlines()[1:3]] == [
        "user       <s> [INST] ask [/INST]",
        "assistant  ⟦ it is</s>⟧",
    ]
    pairs = write(tmp_path / "pairs.jsonl", {"prompt": "ask", "chosen": "it!", "rejected": ["it?", "is"]})
    settings = ("data.chat_template=model", "training.objective=dpo", "data.contradictions=drop")
    code, out, err = call(capsys, "show", pairs, source, *settings)
    assert code == 0, err
    assert "assistant  ⟦ is</s>⟧" in out  # the pair before it has the same tokens, both with <unk>


def test_samples_are_the_first_rows_that_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "chats.jsonl", {"messages": TALK[:2]}, {"messages": TALK}, {"messages": TALK})
    code, out, err = call(capsys, "show", file, "-n", "1", "data.skip_bad=1")
    assert code == 0
    assert out.startswith(f"{file}:2: ")
    assert f"{file}:3: " not in out
    assert f"skipped: {file}:1: " in err
    assert call(capsys, "show", file, "-n", "1")[0] == 8


def test_validation_lists_rows_that_are_too_long_for_a_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"messages": [{"role": "user", "content": "x " * 5000}, TALK[4]]}
    file = write(tmp_path / "chats.jsonl", {"messages": TALK}, long)
    code, out, err = call(capsys, "check", file, "--skip-bad", "1")
    assert code == 8
    assert f"{file}:2\n" in out
    assert " tokens, longer than" in out
    assert "error: 1 of 2 rows" in err
    assert "raise training.sequence_length" in err
    code, out, err = call(capsys, "check", file, "data.too_long=drop")
    assert (code, out) == (0, "")
    assert "1 document longer than" in err
    code, _, err = call(capsys, "check", write(tmp_path / "long.jsonl", long), "data.too_long=drop")
    assert code == 8
    assert "1 document longer than" in err


@pytest.mark.parametrize("command", ["show", "stats", "check"])
def test_the_help_of_each_command_has_examples_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main(["data", command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"\n  ftkit data {command} demo\n" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("command", ["show", "stats", "check"])
def test_looking_at_data_needs_no_cluster_even_on_a_login_node_while_slurm_does_not_respond(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sinfo").write_text(f"#!/bin/sh\n: >{tmp_path}/was-called\nsleep 600\n")
    (programs / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    code, _, err = call(capsys, command, write(tmp_path / "chats.jsonl", {"messages": TALK}), "resources.num_nodes=2")
    assert code == 0, err
    assert not (tmp_path / "was-called").exists()


def test_statistics_predict_the_duration_of_an_epoch_on_the_chosen_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "chats.jsonl", {"messages": TALK})
    words = ("--image", "qwen3:26.05", "--nodes", "1", "training.global_batch_size=8", "--json")
    names = ("seconds", "gpu_hours", "cost")
    epochs = []
    for cluster in ((), ("--cluster", "a4-highgpu-8g")):
        code, out, err = call(capsys, "stats", file, *words, *cluster)
        assert code == 0, err
        epochs.append(json.loads(out)["epoch"])
    assert epochs[0] == {"steps": 1} | dict.fromkeys((*names, *(f"longest_{name}" for name in names)))
    assert epochs[1]["steps"] == 1
    assert epochs[1]["gpu_hours"] == pytest.approx(8 * epochs[1]["seconds"] / 3600)
    assert epochs[1]["longest_gpu_hours"] == epochs[1]["gpu_hours"]  # of a measured family
    with monkeypatch.context() as patched:
        patched.setattr("ftkit.cli.data.longest_step", lambda *_: 2.0)
        epoch = json.loads(call(capsys, "stats", file, *words, *cluster)[1])["epoch"]
        assert [epoch[f"longest_{name}"] for name in names[:2]] == [2 * epochs[1][name] for name in names[:2]]
        assert re.search(r", [\d.]+ s to [\d.]+ s, ", call(capsys, "stats", file, *words[:-1], *cluster)[1])
    for command in ("show", "stats", "check"):
        assert call(capsys, command, file, "--cluster", "nowhere")[0] == 4


def test_contradicting_labels_are_refused_and_unbalanced_ones_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"q{number}", "completion": "a", "label": number < 3} for number in range(4)]
    settings = ("training.objective=kto", "training.method=lora")
    code, _, err = call(capsys, "check", write(tmp_path / "labels.jsonl", *rows), *settings)
    assert code == 0
    assert "3 desirable and 1 undesirable completions" in " ".join(err.split())
    assert "training.kto.undesirable_weight=3" in err
    _, _, err = call(capsys, "check", tmp_path / "labels.jsonl", *settings, "data.validation={count: 2, seed: 1}")
    assert "2 are for validation; kto: " in " ".join(err.split())
    file = write(tmp_path / "both.jsonl", *rows, rows[0] | {"label": False}, rows[1], rows[2] | {"label": None})
    code, out, _ = call(capsys, "check", file, *settings, "--all")
    assert code == 8
    assert f"{file}:5\n  an earlier row prefers what this one rejects" in out
    assert f"{file}:7\n  column 'label' is not a label: None" in out
    assert f"{file}:6" not in out
    code, out, _ = call(capsys, "show", file, *settings, "-n", "4")
    assert [word in out for word in (":1, desirable:", ":4, undesirable:")] == [True, True]


def test_pairs_that_contradict_each_other_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "q", "chosen": one, "rejected": two} for one, two in (("a", "b"), ("a", "b"), ("b", "a"))]
    for objective in ("dpo", "kto"):
        settings = (f"training.objective={objective}", "training.method=lora")
        code, out, _ = call(capsys, "check", write(tmp_path / "pairs.jsonl", *rows), *settings)
        assert code == 8
        assert "1 row: an earlier row prefers what this one rejects" in out


def test_pairs_with_either_side_longer_than_a_pack_are_refused_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = " ".join(map(str, range(900)))
    rows = [{"prompt": "q", "chosen": one, "rejected": two} for one, two in ((long, "a"), ("a", long), ("b", "c"))]
    settings = ("training.objective=dpo", "training.method=lora", "training.sequence_length=256")
    file = write(tmp_path / "pairs.jsonl", *rows)
    code, out, _ = call(capsys, "check", file, *settings, "--all")
    assert code == 8
    assert [f"{file}:{line}\n" in out for line in (1, 2, 3)] == [True, True, False]
    assert "data.too_long=drop" in out
    assert "truncate" not in out  # it is refused for pairs


def test_a_row_with_several_pairs_counts_as_trained_while_one_of_them_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = (("a", ["b", "c"]), ("b", ["a"]), ("c", ["a", "b"]))  # of the last, only the first pair is a contradiction
    rows = [{"prompt": "q", "chosen": chosen, "rejected": rejected} for chosen, rejected in sides]
    (tmp_path / "ftkit.yaml").write_text("workspace: ./work\n")
    file = write(tmp_path / "pairs.jsonl", *rows)
    settings = ("training.objective=dpo", "training.method=lora", "data.contradictions=drop", "--cluster", "local")
    code, _, err = call(capsys, "prepare", file, *settings)
    assert code == 0, err
    (folder,) = (tmp_path / "work" / "data").iterdir()
    manifest = PreparedData(folder).read_manifest()
    assert (manifest.num_train_documents, manifest.sources[0].num_train_rows) == (2 * 3, 2)


@pytest.mark.parametrize(("objective", "num_kept"), [("dpo", 4), ("kto", 5)])  # of 2 and 3 rows
def test_contradictions_are_dropped_and_counted_if_the_recipe_says_so(
    objective: str, num_kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "q", "chosen": one, "rejected": two} for one, two in (("a", "b"), ("b", "a"), ("c", "c"))]
    rows += [{"prompt": "q", "chosen": "a", "rejected": " ".join(map(str, range(900)))}, rows[0]]
    settings = (
        f"training.objective={objective}", "training.method=lora", "training.sequence_length=256",
        "data.contradictions=drop", "data.too_long=drop", "--cluster", "local",
    )  # fmt: skip
    (tmp_path / "ftkit.yaml").write_text("workspace: ./work\n")
    file = write(tmp_path / "pairs.jsonl", *rows)
    code, _, err = call(capsys, "check", file, *settings)
    assert code == 0, err
    assert "2 equal or contradicting pairs dropped" in " ".join(err.split())
    code, _, err = call(capsys, "prepare", file, *settings)
    assert code == 0, err
    assert "2 equal or contradicting pairs dropped" in " ".join(err.split())
    (folder,) = (tmp_path / "work" / "data").iterdir()
    manifest = PreparedData(folder).read_manifest()
    assert (manifest.num_train_documents, manifest.sources[0].num_train_rows) == (num_kept, -(-num_kept // 2))
    refused = write(tmp_path / "refused.jsonl", *rows, {"prompt": "q", "chosen": "", "rejected": "b"})
    code, _, err = call(capsys, "check", refused, *settings)
    assert code == 8
    assert "2 equal or contradicting pairs dropped" in " ".join(err.split())
    code, out, _ = call(capsys, "check", file, *settings, "data.contradictions=refuse")
    assert code == 8
    assert "are the same" in out


def test_a_pair_with_equal_sides_is_dropped_alone_and_the_other_pairs_of_its_row_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "p", "chosen": "one", "rejected": ["two", "one", " one", "red"]},
        {"prompt": "q", "chosen": "a", "rejected": "a"},
    ]
    file = write(tmp_path / "pairs.jsonl", *rows)
    (tmp_path / "ftkit.yaml").write_text("workspace: ./work\n")
    settings = ("training.objective=dpo", "training.method=lora", "data.contradictions=drop", "--cluster", "local")
    code, _, err = call(capsys, "check", file, *settings)
    assert code == 0, err
    assert "2 rows; 3 equal or contradicting pairs dropped" in " ".join(err.split())
    assert "2; 3 equal or contradicting pairs dropped" in " ".join(call(capsys, "stats", file, *settings)[1].split())
    stats = json.loads(call(capsys, "stats", file, *settings, "--json")[1])
    assert [stats[name] for name in ("num_dropped", "num_documents", "num_duplicates")] == [3, 4, 0]
    assert stats["sources"][0]["num_train_rows"] == 1
    code, _, err = call(capsys, "prepare", file, *settings)
    assert code == 0, err
    assert "data.contradictions: 3 equal or contradicting pairs dropped" in " ".join(err.split())
    (folder,) = (tmp_path / "work" / "data").iterdir()
    manifest = PreparedData(folder).read_manifest()
    assert (manifest.num_train_documents, manifest.sources[0].num_train_rows) == (4, 1)
    code, out, _ = call(capsys, "check", file, *settings, "data.contradictions=refuse")
    assert (code, f"{file}:1" in out) == (8, True)


def test_packs_of_a_single_completion_are_warned_of_for_kto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"q{number}", "completion": "a", "label": number % 2} for number in range(4)]
    file = write(tmp_path / "labels.jsonl", *rows)
    (tmp_path / "ftkit.yaml").write_text("workspace: ./work\n")
    settings = ("training.objective=kto", "training.method=lora", "--cluster", "local")
    for length, is_warned in ((24, True), (256, False)):
        code, _, err = call(capsys, "prepare", file, *settings, f"training.sequence_length={length}")
        assert code == 0, err
        assert ("many packs have a single completion" in " ".join(err.split())) is is_warned
