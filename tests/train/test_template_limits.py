"""Chat templates without bounds on time or memory are refused wherever they run; honest ones never meet the limits."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.cli.main import main
from ftkit.config.data import DataSpec, MessagesFormat
from ftkit.data import limits
from ftkit.data.cases import encode_prompts
from ftkit.data.conversations import Conversation, Message
from ftkit.data.encoding import RowEncoder
from ftkit.data.limits import TemplateLimitError
from ftkit.data.rendering import ChatRenderer
from ftkit.data.rows import Row
from ftkit.data.tokenizer_files import TEMPLATES
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.errors import DataError
from ftkit.train.components.export_record import make_prompts

if TYPE_CHECKING:
    from pathlib import Path

LOOP, END = "{% for i in range(99999) %}" * 3, "{% endfor %}" * 3
GROW = "{% set ns = namespace(s='ab', l=[1]) %}{% for i in range(60) %}{% set "
HOSTILE = {
    "nested loops that write": LOOP + "x" + END,
    "nested loops that assign": LOOP + "{% set a = i %}" + END,
    "a loop of calls": "{% set c = cycler(1, 2) %}" + LOOP + "{{ c.next() }}" + END,
    "a filter's width": "{{ '%4000000000d'|format(1) }}",
    "an operator's width": "{{ '%4000000000d' % 1 }}",
    "a format's width": "{{ '{:4000000000d}'.format(1) }}",
    "a nested format": "{{ '{0:{1}}'.format('x', 4000000000) }}",
    "a precision": "{{ '%.2000000000f' % 1.5 }}",
    "center as a filter": "{{ 'x'|center(4*10**9) }}",
    "center as a method": "{{ 'x'.center(4000000000) }}",
    "ljust": "{{ 'x'.ljust(4000000000) }}",
    "zfill": "{{ 'x'.zfill(4000000000) }}",
    "a text times a number": "{{ 'a' * (4*10**9) }}",
    "a list times a number": "{{ [0] * (4*10**9) }}",
    "a tuple times a number": "{{ (1, 2) * (10**10) }}",
    "a date of a gigabyte": "{{ strftime_now('%Y' * 200000000) }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a power that is computed": "{% set n = messages|length + 9 %}{{ (n ** 99999999) % 7 }}",
    "digits of a large number": "{{ (2 ** 1000000000)|string }}",
    "a text that doubles": GROW + "ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a list that doubles": GROW + "ns.l = ns.l + ns.l %}{% endfor %}",
    "a join that doubles": GROW + "ns.s = [ns.s, ns.s]|join %}{% endfor %}",
    "a replacement that multiplies": GROW + "ns.s = ns.s|replace('a', 'a' * 1000) %}{% endfor %}",
    "a comparison of shared lists": GROW.replace("l=[1]", "l=[1], m=[1]")
    + "ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}{{ ns.l == ns.m }}",
    "JSON of shared lists": GROW + "ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l|tojson }}",
    "JSON of wide indents": "{{ [[[[1]]]]|tojson(indent=2000000000) }}",
    "JSON that is deep": GROW.replace("60", "9999") + "ns.l = [ns.l] %}{% endfor %}{{ ns.l|tojson }}",
    "lists that are deep": GROW.replace("60", "9999") + "ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a macro that branches": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a sum of lists": "{{ ([[0] * 10000] * 100000)|sum(start=[])|length }}",
    "slices": "{{ range(99999)|slice(2000000000)|list|length }}",
    "batches": "{{ [1]|batch(4000000000, 0)|list|length }}",
    "a map": "{{ range(99999)|map('string')|map('center', 99999)|join|length }}",
    "indents": "{{ ('a\\n' * 100000)|indent(1000000) }}",
    "wrapped words": "{{ ('a ' * 50000000)|wordwrap(3) }}",
    "escapes": "{{ ('<' * 200000000)|e }}",
    "titles": "{{ ('a b ' * 100000000)|title }}",
    "bytes": "{{ ('é' * 400000000).encode('utf-8') }}",
    "parts": "{{ ('a ' * 100000000).split()|length }}",
    "filler": "{{ lipsum(n=100000000) }}",
    "a sort": "{{ (range(99999)|list * 500)|sort|length }}",
    "nested parentheses": "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
    "nested lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "nested conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "many operators": "{{ " + " + ".join(["1"] * 100000) + " }}",
    "a long source": "{{ 1 }}" * 1000000,
}
WORD = "now, and not in any conversation with which a template is inspected"
AT_A_WORD = {
    name: TEMPLATES["chatml"].template.replace(
        "{%- for turn in messages %}",
        f"{{%- for turn in messages %}}{{% if turn.content == '{WORD}' %}}{HOSTILE[name]}{{% endif %}}",
    )
    for name in ("nested loops that assign", "a text times a number", "a comparison of shared lists")
}
DATA = DataSpec.model_validate({"source": {"kind": "files", "train": "/x"}})


def tokenizer_with(template: str) -> Any:
    tokenizer = learn_tokenizer(["hello world"], 300, "chatml")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(autouse=True)
def _no_memory_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_refused", {})


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that honest templates keep too, so that the tests of others take less time."""
    monkeypatch.setattr(limits, "CPU_SECONDS", 0.4)
    monkeypatch.setattr(limits, "MEMORY_BYTES", 256 << 20)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_without_bounds_is_refused_before_it_takes_time_or_memory(name: str) -> None:
    with pytest.raises(DataError):
        ChatRenderer.of(tokenizer_with(HOSTILE[name] + TEMPLATES["chatml"].template), {}).find_unproven()


@pytest.mark.parametrize("mebibytes", [480, 600, 720])
def test_a_template_that_reaches_both_limits_at_once_is_refused_by_name(
    mebibytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CPU_SECONDS", 0.4)
    monkeypatch.setattr(limits, "MEMORY_BYTES", mebibytes << 20)
    template = HOSTILE["a date of a gigabyte"] + TEMPLATES["chatml"].template
    with pytest.raises(TemplateLimitError):
        ChatRenderer.of(tokenizer_with(template), {}).find_unproven()


def row(user: str, assistant: str = "Yes.", number: int = 1) -> Row:
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return Row({"messages": turns}, f"data.jsonl:{number}")


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", AT_A_WORD)
def test_a_template_without_bounds_at_some_row_is_refused_by_name_and_not_tried_again(name: str) -> None:
    tokenizer = tokenizer_with(AT_A_WORD[name])
    tokenizer.name_or_path = "stranger/model"
    encoder = RowEncoder.of(tokenizer, DATA, MessagesFormat(), len(tokenizer))
    (fine,) = encoder.encode([row("Hi")])
    assert not isinstance(fine, DataError)
    where = "" if name == "a comparison of shared lists" else "data.jsonl:2: "  # Python handles no signal, and ends
    with pytest.raises(TemplateLimitError, match=f"^{where}the chat template of 'stranger/model' takes more than"):
        encoder.encode([row("Hi"), row(WORD, number=2), row("Hi")])
    with pytest.raises(TemplateLimitError):
        encoder.encode([row("Hi")])


def test_a_fork_runs_no_destructor_of_its_parents_garbage(tmp_path: Path) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            (tmp_path / "destroyed").touch()

    gc.disable()
    try:
        Cycle()
        limits.run_in_fork(limits.Template("a template", "a template with garbage"), gc.collect)
        assert not (tmp_path / "destroyed").exists()
    finally:
        gc.enable()


@dataclass
class Model:
    tokenizer: Any
    label: str = "stranger/model"


@pytest.mark.usefixtures("small_limits")
def test_prompts_of_evaluation_and_the_record_of_an_export_are_rendered_within_the_limits() -> None:
    tokenizer = tokenizer_with(AT_A_WORD["a text times a number"])
    renderer = ChatRenderer.of(tokenizer, {})
    with pytest.raises(TemplateLimitError, match=r"^f:1: "):
        encode_prompts(Model(tokenizer), renderer, [Row({"prompt": WORD}, "f:1")], None)
    with pytest.raises(DataError, match="takes more than"):
        renderer.render(Conversation((Message("user", WORD),)), open_turn=True)
    with pytest.raises(DataError, match="takes more than"):
        make_prompts(tokenizer_with(HOSTILE["nested loops that assign"]))


def test_an_export_renders_dates_as_training_did_on_any_day() -> None:
    tokenizer = tokenizer_with(
        "{{ strftime_now('%d %b %Y, %H:%M:%S.%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert all(prompt.text.startswith("01 Jan 2025, 00:00:00.000000") for prompt in make_prompts(tokenizer))


@pytest.mark.parametrize("name", ["a comparison of shared lists", "a text times a number"])
def test_preparing_many_rows_names_the_template_that_ended_a_worker(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "CPU_SECONDS", 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    rows = [row("Hi", str(number)).columns for number in range(64 * 6)] + [row(WORD).columns]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    tokenizer_with(AT_A_WORD[name]).save_pretrained(tmp_path / "tokenizer")
    words = ["data.source=./chats.jsonl", "data.format=auto", "data.chat_template=model"]
    words += ["model.tokenizer={source: ./tokenizer, vocab_size: null}", "model.architecture.vocab_size=300"]
    assert main(["data", "stats", "demo", *words, "evaluation.generation=null"]) == DataError.exit_code
    assert "takes more than" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("word", ["a ", "\N{GRINNING FACE} ", "<|im_end|>"])
def test_a_conversation_of_2000_turns_and_10_megabytes_keeps_the_limits(name: str, word: str) -> None:
    text = word * (5000 // len(word))
    messages = tuple(Message("assistant" if number % 2 else "user", text) for number in range(2000))
    renderer = ChatRenderer.of(learn_tokenizer(["hello world"], 300, name), {})
    (rendering,) = renderer.renderings(Conversation(messages), DATA)
    assert len(rendering.spans) == 1000
