"""The progress of a script, read from what training scripts print."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.planning.layout import RunLayout
from ftkit.runs.records import ScriptStepRecord, from_line, to_line
from ftkit.runs.script_log import parse_progress, read_script_step

BAR = " 12%|█▏        | 12/100 [00:10<01:15,  1.17it/s]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BAR, (12, 100, None, None)),
        (f"[rank0]:{BAR}", (12, 100, None, None)),
        ("Epoch 0:  12%|█▏  | 12/100 [00:10<01:15, 1.17it/s, v_num=0, train_loss=1.230]", (12, 100, 1.23, None)),
        ("1|12|Loss: 1.23:  12%|█▏  | 12/100 [00:10<01:15,  1.17it/s]", (12, 100, 1.23, None)),
        ("Steps:  12%|█▏  | 12/100 [00:10<01:15, 1.17s/it, lr=0.0001, step_loss=0.5]", (12, 100, 0.5, 1e-4)),
        (BAR + "{'loss': 1.2, 'grad_norm': 2.5, 'learning_rate': 5e-05, 'epoch': 0.3}", (12, 100, 1.2, 5e-5)),
        (BAR + "\r{'loss': '1.2', 'grad_norm': '2.5', 'learning_rate': '4.763e-05'}", (12, 100, 1.2, 4.763e-5)),
        ("{'loss': nan, 'grad_norm': nan, 'learning_rate': 0.0}", (0, None, math.nan, 0.0)),
        ("step 10/100 loss=0.5", (10, 100, 0.5, None)),
        ("Step: 1,200 of 5,000, train loss: 0.5, lr: 1e-4", (1200, 5000, 0.5, 1e-4)),
        ("step: 10  \x1b[32mloss:  7.1234  \x1b[0mgrad_norm: 1.5  memory: 3.25GiB(4.1%)", (10, None, 7.1234, None)),
        ("iter 100: loss 3.2411, time 120.5ms, mfu 12.3%", (100, None, 3.2411, None)),
        (
            " iteration       10/     100 | consumed samples: 80 | learning rate: 1.0E-04 | lm loss: 1.25E+00 |",
            (10, 100, 1.25, 1e-4),
        ),
        ("12/100 ━━━━━━━━━━━━━━━━━━━━ 1s 10ms/step - accuracy: 0.9 - loss: 0.3000", (12, 100, 0.3, None)),
        ('{"step": 10, "loss": 0.5, "lr": 0.0001}', (10, None, 0.5, 1e-4)),
        ("epoch 1 step 7 loss: tensor(0.5, grad_fn=<NllLossBackward0>)", (7, None, 0.5, None)),
        ("step=10, skipped=0, lr=[1e-05], loss=0.5", (10, None, 0.5, 1e-5)),
    ],
)
def test_progress_in_a_common_form_is_read(text: str, expected: tuple[object, ...]) -> None:
    found = parse_progress(text.splitlines())
    assert (found.step, found.num_steps, found.loss, found.learning_rate) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    "text",
    [
        "Map:  12%|█▏        | 12/100 [00:10<01:15,  1.17 examples/s]",
        "Loading checkpoint shards: 100%|██████████| 2/2 [00:01<00:00,  1.17it/s]",
        "Validation DataLoader 0:  12%|█▏  | 12/100 [00:10<01:15]",
        "{'eval_loss': 0.5, 'eval_runtime': 1.5}",
        "validation loss: 0.5, val/loss: 0.4",
        "{'train_runtime': 14.7, 'train_loss': 4.4, 'epoch': 16}",
        "Namespace(max_steps=100, steps=5, lr=1e-4, loss='ce')",
        "  Total optimization steps = 100",
        "loss scale: 65536, 3 step/s",
        "see https://example.com/step/10 and step 10",
        " 12%|█▏  | 120/100 [00:10<01:15,  1.17it/s]",
    ],
)
def test_other_numbers_are_no_progress(text: str) -> None:
    assert parse_progress([text]) == ScriptStepRecord(0, 0)


def bar(step: int, total: int) -> str:
    return f"{step * 100 // total}%|█   | {step}/{total} [00:10<01:15,  1.17it/s]"


def test_the_bar_of_an_evaluation_is_not_that_of_the_training() -> None:
    lines = [bar(9, 100), bar(10, 100), bar(1, 8), bar(5, 8)]
    assert parse_progress(lines).step == 10
    lines += [bar(8, 8), "{'eval_loss': 0.5}", bar(20, 100), "{'loss': 1.5}"]
    assert (parse_progress(lines).step, parse_progress(lines).num_steps) == (20, 100)
    lines += [bar(100, 100), bar(8, 8)]
    assert parse_progress(lines).step == 100


def test_a_bar_in_front_of_the_training_is_passed_over() -> None:
    lines = [bar(500, 500), bar(1, 100), bar(2, 100)]
    assert parse_progress(lines).num_steps == 100


def test_counted_steps_exceed_those_of_one_epoch() -> None:
    found = parse_progress([f"Epoch 2: {bar(12, 100)} loss=0.5"], num_counted=212)
    assert (found.step, found.num_steps, found.loss) == (212, None, 0.5)
    assert parse_progress([bar(12, 100)], num_counted=14).step == 14  # the bar is drawn later than steps are taken


PIECES = st.sampled_from(
    [BAR, "\r", "\x1b[A", "loss", "step ", "'loss': ", "1e9", "12/100 ", "lr=", "9" * 25, "%|", "[", "nan", "inf"]
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=60), st.integers(0, 2**40))
def test_any_output_gives_progress_that_can_be_recorded(pieces: list[str], counted: int) -> None:
    found = parse_progress("".join(pieces).splitlines(), counted)
    assert found.step >= counted
    assert found.num_steps is None or found.step <= found.num_steps
    assert from_line(to_line(found)) is not None


@given(st.text(max_size=200).filter(lambda text: "loss" not in text.lower() and "|" not in text))
def test_lines_around_progress_do_not_change_it(other: str) -> None:
    lines = [*other.splitlines(), BAR, "{'loss': 1.5, 'learning_rate': 1e-4}", *other.splitlines()]
    found = parse_progress(lines)
    assert (found.step, found.num_steps, found.loss, found.learning_rate) == (12, 100, 1.5, 1e-4)


@pytest.mark.parametrize(
    "piece", ["1", "%", "|", "loss ", "loss: -", "step ", "step 1/", "a", "1%||1/1 [", "[rank0]", " "]
)
def test_reading_takes_time_in_proportion_to_the_output(piece: str) -> None:
    line = (piece * 2000)[:2000]
    began = time.process_time()
    parse_progress([line] * 33)
    assert time.process_time() - began < 0.5


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.logs.mkdir(parents=True)
    layout.job_log.write_text("step 1/9 loss 3\n" + "x" * 79 * 2000 + "\n" + "step 2/9 loss 2\n")
    found = read_script_step(layout)
    assert found is not None
    assert (found.step, found.num_steps, found.loss) == (2, 9, 2)
    layout.job_log.write_text("step 1/9 loss 3\n" + "x\n" * 2**16)
    assert read_script_step(layout) is None
