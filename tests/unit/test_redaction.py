"""What is secret is left out of a line, by its value or by its form; what is not stays as it is."""

import pytest

from checkpointing.redaction import redactor

KEY_ID = "AKIA" + "IOSFODNN7EXAMPLE"
GITHUB = "ghp_" + "0123456789abcdefghijABCDEFGHIJ012345"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("GET https://me:pa55word@host:8080/x?y=1", "GET https://me:***@host:8080/x?y=1"),
        ("redis://:pa55word@host, s3://bucket", "redis://:***@host, s3://bucket"),
        ("Authorization: Bearer abc.def-123 (sent)", "Authorization: ***"),
        ("{'authorization': 'Basic dXNlcjpwYXNz', 'host': 'h'}", "{'authorization': '***', 'host': 'h'}"),
        ("with bearer abcdefgh1234", "with bearer ***"),
        (
            "PUT /k?X-Amz-Credential=AK/2026&X-Amz-Signature=0a1b2c&x=1",
            "PUT /k?X-Amz-Credential=***&X-Amz-Signature=***&x=1",
        ),
        (f"signed by {KEY_ID}.", "signed by ***."),
        (f"pushed with {GITHUB} to", "pushed with *** to"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7", "aws_secret_access_key = ***"),
        ('{"db_password": "hunter22", "user": "me"}', '{"db_password": "***", "user": "me"}'),
        ("api-key=abcdef123456, retry", "api-key=***, retry"),
        ("export MY_TOKEN=abcdef123", "export MY_TOKEN=***"),
    ],
)
def test_what_has_the_form_of_a_secret(line: str, expected: str) -> None:
    assert redactor({})(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "max_tokens=4096000 eos_token: <|im_end|> tokens_generated=123456789",
        "http://host:8000/v1/models asked by a@b",
        "GET http://127.0.0.1:41234 user@example.org",
        "tokenizer=Qwen/Qwen3-8B, special_tokens: abcdefgh",
        "step 12: loss 0.5, reward 0.25, sk-learn, AKIA",
        "the author: somebody who authorizes",
    ],
)
def test_what_is_no_secret_stays(line: str) -> None:
    assert redactor({})(line) == line


def test_values_of_secret_variables() -> None:
    redact = redactor(
        {"WANDB_API_KEY": "abc+def/1", "HF_TOKEN": "abc+de", "X_PASSPHRASE": "x y z w",
         "SHORT_SECRET": "a", "TOKENIZERS_PARALLELISM": "parallel", "HOME": "/home/me"}
    )  # fmt: skip
    assert redact("abc+def/1|abc+de|abc%2Bdef%2F1|x y z w|a parallel /home/me") == "***|***|***|***|a parallel /home/me"
