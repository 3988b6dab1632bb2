from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.config.training import TrainingSpec
from ftkit.launch.new_recipe import DocumentLengths, choose_data, choose_training, methods_to_try

LENGTHS = st.lists(st.integers(1, 300_000), min_size=1, max_size=50).map(sorted)


def chosen(
    found: DocumentLengths, method: str = "lora", num_processes: int = 1, parameters: float = 8e9
) -> dict[str, object]:
    length = found.length_of_packs(131_072)
    choices = [
        *choose_data(found, length, has_validation=False),
        *choose_training(found, length, method, int(parameters), num_processes),  # type: ignore[arg-type]
    ]
    assert all(len(each.why.split()) <= 8 for each in choices)
    return {each.key: each.value for each in choices}


def test_few_long_documents_are_left_out_and_counted() -> None:
    found = DocumentLengths((*[400] * 96, *[9000] * 4), num_rows=100, num_encoded=100, is_text=False)
    assert chosen(found)["sequence_length"] == 512
    assert chosen(found)["too_long"] == "drop"
    assert found.num_longer(512) == 4
    assert found.num_tokens(512) == 96 * 400


def test_all_documents_fit_if_the_longest_is_at_most_twice_as_long() -> None:
    found = DocumentLengths((*[400] * 96, *[700] * 4), num_rows=100, num_encoded=100, is_text=False)
    assert chosen(found)["sequence_length"] == 1024
    assert "too_long" not in chosen(found)


def test_packs_are_not_longer_than_the_positions_of_the_model() -> None:
    found = DocumentLengths((9000,), num_rows=1, num_encoded=1, is_text=False)
    assert found.length_of_packs(4096) == 4096


@given(lengths=LENGTHS, num_rows=st.integers(1, 10**6), num_processes=st.sampled_from([1, 2, 3, 8, 16]))
def test_batches_divide_among_the_processes_and_small_data_has_several_steps(
    lengths: list[int], num_rows: int, num_processes: int
) -> None:
    found = DocumentLengths(tuple(lengths), num_rows, len(lengths), is_text=False)
    values = chosen(found, num_processes=num_processes)
    packs, length = values["global_batch_size"], found.length_of_packs(131_072)
    assert isinstance(packs, int)
    assert packs % num_processes == 0
    assert packs <= num_processes or packs * 20 <= found.num_tokens(length) / length * num_processes


@pytest.mark.parametrize(
    ("method", "parameters", "rate"),
    [("full", 8e9, 2e-5), ("full", 70e9, 1e-5), ("lora", 8e9, 2e-4), ("qlora", 70e9, 1e-4)],
)
def test_learning_rates_are_those_of_the_papers(method: str, parameters: float, rate: float) -> None:
    found = DocumentLengths((400,), num_rows=10, num_encoded=1, is_text=False)
    assert chosen(found, method, parameters=parameters)["learning_rate"] == pytest.approx(rate)


def test_small_models_and_texts_train_all_weights_if_they_fit() -> None:
    assert methods_to_try(8 * 10**9, is_text=False, on_gpu=True) == ("lora", "qlora")
    assert methods_to_try(8 * 10**9, is_text=True, on_gpu=True)[0] == "full"
    assert methods_to_try(10**8, is_text=False, on_gpu=True)[0] == "full"
    assert "qlora" not in methods_to_try(8 * 10**9, is_text=False, on_gpu=False)


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 2e-4), ({"method": "full"}, 2e-5),
        ({"objective": "dpo"}, 5e-6), ({"objective": "kto", "method": "full"}, 5e-7),
        ({"objective": "orpo", "method": "full"}, 8e-6),
    ],
)  # fmt: skip
def test_a_recipe_without_a_learning_rate_gets_that_of_its_objective_and_method(
    settings: dict[str, str], rate: float
) -> None:
    values = {"sequence_length": 8, "global_batch_size": 1, "method": "lora", **settings}
    assert TrainingSpec.model_validate(values).learning_rate == rate
