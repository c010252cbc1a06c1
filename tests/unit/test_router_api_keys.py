"""API keys: what a file may hold, whose a call is, and that neither keys nor digests are ever shown."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from pathlib import Path

import pytest

from pdcore.api_key import MAX_KEY_CHARS, key_metadata
from pdcore.errors import ConfigError, InvalidRequest, Unauthenticated
from router.api_keys import ApiKeys, Door, Holder, tenant_of
from security import secret

KEY = "sk-3f9a77c1d0"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


def load(tmp_path: Path, text: str) -> ApiKeys:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return ApiKeys.load(path)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """To open one takes until somebody writes to it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="something else"):
        ApiKeys.load(tmp_path / "pipe")


@pytest.mark.parametrize("write", [json.dumps, lambda d: "".join(f"{k}: {v}\n" for k, v in d.items())])
def test_yaml_and_json(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    keys = load(tmp_path, write({DIGEST: "acme", digest_of("other").upper(): "b"}))
    assert keys.holder(key_metadata(KEY)) == Holder("acme")
    assert keys.holder((("x", "y"), *key_metadata("other"))) == Holder("b")
    assert keys.holder([("authorization", f"bearer  {KEY}")]) == Holder("acme")


def test_digests_and_tenants_that_look_like_numbers(tmp_path: Path) -> None:
    key = next(str(n) for n in range(10**6) if digest_of(str(n)).startswith(("0e", "1e")))
    assert load(tmp_path, f"{digest_of(key)}: 007\n").holder(key_metadata(key)) == Holder("007")


@pytest.mark.parametrize(
    ("entry", "holder"),
    [
        ("{tenant: ops, admin: true}", Holder("ops", admin=True)),
        ('{"admin": true, "tenant": "ops"}', Holder("ops", admin=True)),
        ("{tenant: 007, admin: false}", Holder("007")),
        ("{tenant: ops}", Holder("ops")),
    ],
)
def test_operators(tmp_path: Path, entry: str, holder: Holder) -> None:
    keys = load(tmp_path, f"{DIGEST}: {entry}\n")
    assert keys.holder(key_metadata(KEY)) == holder
    door = Door(keys)
    assert door.caller(key_metadata(KEY)) == holder.tenant
    if holder.admin:
        door.admit_admin(key_metadata(KEY))
    else:
        with pytest.raises(Unauthenticated, match="no operator's"):
            door.admit_admin(key_metadata(KEY))
    for nobody in ((), key_metadata("another")):
        with pytest.raises(Unauthenticated):
            door.admit_admin(nobody)


def test_keys_are_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """API keys and the cluster's secret, right ones and wrong ones: whole, by what takes the same time for each."""
    compared: list[tuple[bytes, bytes]] = []

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return False

    keys = load(tmp_path, f"{DIGEST}: acme\n")
    monkeypatch.setattr(hmac, "compare_digest", spy)
    for given in (KEY, "another"):
        with pytest.raises(Unauthenticated):  # nothing else opens
            keys.holder(key_metadata(given))
    digest = bytes.fromhex(DIGEST)
    assert compared == [(digest, digest), (b"", hashlib.sha256(b"another").digest())]
    compared.clear()
    gate = secret._Gate("right" * 4)
    for given in ("right" * 4, "wrong"):
        assert not gate.open_to("/pdserve.v1.Kv/Push", [(secret.SECRET_METADATA, given)])
    assert compared == [(b"right" * 4, b"right" * 4), (b"wrong", b"right" * 4)]


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        key_metadata("another"),
        key_metadata(DIGEST),
        (*key_metadata(KEY), *key_metadata(KEY)),
        (("authorization", KEY),),
        (("authorization", f"Basic {KEY}"),),
        (("authorization", "Bearer"),),
        (("authorization", ""),),
        (("authorization", b"Bearer x"),),
        (("authorization", f"Bearer {'x' * (MAX_KEY_CHARS + 1)}"),),
        (("authorization-bin", f"Bearer {KEY}".encode()),),
    ],
)
def test_nobody_else_gets_in(tmp_path: Path, metadata) -> None:  # type: ignore[no-untyped-def]
    keys = load(tmp_path, f"{DIGEST}: acme\n")
    with pytest.raises(Unauthenticated) as refused:
        Door(keys).caller(metadata)
    assert KEY not in str(refused.value)
    assert DIGEST not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not an empty one"),
        ("{}", "not an empty one"),
        ("- a", "a mapping"),
        (f"{KEY}: acme", "64 hexadecimal digits.*line 1"),
        (f"{DIGEST}: a\n{KEY}: b", "line 2"),
        (f"{DIGEST}: [a]", "a tenant's name.*line 1"),
        (f"{DIGEST}: {{admin: true}}", "tenant: NAME, admin: true.*line 1"),
        (f"{DIGEST}: {{tenant: a, admin: yes}}", "tenant: NAME, admin: true.*line 1"),
        (f"{DIGEST}: {{tenant: a, operator: true}}", "tenant: NAME, admin: true.*line 1"),
        (f"{DIGEST}: {{tenant: a, admin: true, admin: true}}", "tenant: NAME, admin: true.*line 1"),
        (f"{DIGEST}: {{tenant: {{a: b}}}}", "tenant: NAME, admin: true.*line 1"),
        (f"{DIGEST}: {{? [tenant] : a}}", "tenant: NAME, admin: true.*line 1"),
        (f"{DIGEST}: {{tenant: ''}}", "a tenant's name"),
        (f"{DIGEST}: ''", "a tenant's name"),
        (f"{DIGEST}: {'x' * 129}", "128 characters"),
        (f"{DIGEST}: a\n{DIGEST.upper()}: b", "each key once.*line 2"),
        (f"{DIGEST}: a\n  {KEY}: {{", "valid YAML or JSON.*line"),
    ],
)
def test_bad_files_are_refused_without_showing_what_is_in_them(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}") as refused:
        load(tmp_path, text)
    assert refused.value.key == "router.api_keys_file"
    shown = str(refused.value) + repr(refused.value.__cause__)
    assert KEY not in shown
    assert DIGEST not in shown.lower()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys.load(tmp_path / "none")


def test_without_keys_tenants_are_who_they_say_they_are() -> None:
    assert Door(None).caller(()) is None
    Door(None).admit_admin(())
    assert tenant_of(None, "acme") == "acme"


def test_with_keys_the_key_says_it() -> None:
    assert tenant_of("acme", "") == tenant_of("acme", "acme") == "acme"
    with pytest.raises(InvalidRequest) as refused:
        tenant_of("acme", "other")
    assert refused.value.field == "tenant"
    assert "acme" not in str(refused.value)


@pytest.mark.parametrize("key", ["a b", "ä", "a\nb", "x" * (MAX_KEY_CHARS + 1)])
def test_what_cannot_be_sent_is_refused_unseen(key: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII") as refused:
        key_metadata(key)
    assert key not in str(refused.value)
    assert key_metadata("") == ()
