"""Secrets are redacted in errors, commands and environment listings."""

from __future__ import annotations

import pytest

from ftkit.errors import redact, redact_command

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N"


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("tracker.api_key=abc", "tracker.api_key=***"),
        ("HF_TOKEN=abc", "HF_TOKEN=***"),
        ("tracker.password=a b'c", "tracker.password=***"),
        ("model.weights=hf_abcdefghijklmnop", "model.weights=***"),
        ("--image=docker://me:secret@host/x", "--image=docker://***@host/x"),
        ("https://abcdef@host/x", "https://***@host/x"),
        ("me:secret@host", "***@host"),
        ("training.learning_rate=1e-5", "training.learning_rate=1e-5"),
        ("evaluation.generation.max_new_tokens=8", "evaluation.generation.max_new_tokens=8"),
        ("model.architecture.num_key_value_heads=4", "model.architecture.num_key_value_heads=4"),
        ("model.tokenizer.source=trained", "model.tokenizer.source=trained"),
        ("olmo3:25.02@sha256:0123", "olmo3:25.02@sha256:0123"),
        ("model=run:careless@best", "model=run:careless@best"),
        ("model=run:try-1.5@300", "model=run:try-1.5@300"),
        ("proxy=run:secret@host:3128", "proxy=***@host:3128"),
        ("docker://nvcr.example#team/olmo3:25.02@sha256:0123", "docker://nvcr.example#team/olmo3:25.02@sha256:0123"),
    ],
)
def test_only_secrets_are_redacted_in_a_command(typed: str, kept: str) -> None:
    assert redact_command([typed], {}) == [kept]


def test_the_value_after_a_secret_option_is_redacted() -> None:
    assert redact_command(["--password", "abc", "demo"], {}) == ["--password", "***", "demo"]
    assert redact_command(["--require-signature", "a.pub"], {}) == ["--require-signature", "a.pub"]


@pytest.mark.parametrize(
    "secret",
    ["AKIAIOSFODNN7EXAMPLE", "ghp_0123456789abcdef", "github_pat_0123456789", "xoxb-0123456789", JWT,
     "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----"],
)  # fmt: skip
def test_tokens_with_an_issuer_s_prefix_are_redacted_anywhere(secret: str) -> None:
    assert redact(f"ValueError: can't use ({secret}) here", {}) == "ValueError: can't use (***) here"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("fatal: 'https://TOK@git.example/x.git': 403", "fatal: 'https://***@git.example/x.git': 403"),
        ("postgresql://me:p@ss@db.example/x", "postgresql://***@db.example/x"),
        ("login(user, password='a b c', retries=3)", "login(user, password=***, retries=3)"),
        ('{"aws_secret_access_key": "wJal/rXUt", "region": "eu"}', '{"aws_secret_access_key": ***, "region": "eu"}'),
        ("GET /x?X-Amz-Signature=abc&X-Amz-Date=1", "GET /x?X-Amz-Signature=***&X-Amz-Date=1"),
        ("Authorization: Bearer abcdefghij", "Authorization: ***"),
        ("sent bearer abcdefghij", "sent bearer ***"),
        ("ran: login --api-key abc --user me", "ran: login --api-key *** --user me"),
        ("tokenizer.pad_token = tokenizer.eos_token", "tokenizer.pad_token = tokenizer.eos_token"),
        ("'--require-signature': File 'a.pub' is missing", "'--require-signature': File 'a.pub' is missing"),
        ("300 tokens a second; token: a word", "300 tokens a second; token: a word"),
        ('File "/w/ftkit/a.py", line 3, in f', 'File "/w/ftkit/a.py", line 3, in f'),
    ],
)
def test_only_secrets_are_redacted_in_a_text(text: str, shown: str) -> None:
    assert redact(text, {}) == shown


def test_values_of_secret_variables_are_redacted_everywhere() -> None:
    environment = {"WANDB_API_KEY": "0123456789abcdef", "MY_TOKEN": "no", "HOME": "/home/somebody"}
    text = "ValueError: no 0123456789abcdef in /home/somebody"
    assert redact(text, environment) == "ValueError: no *** in /home/somebody"
