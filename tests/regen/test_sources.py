"""Sources of the mix: every shape of record, bad rows listed with their reasons, ids that stay apart."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from specgraft.config import SourceSection
from specgraft.regen.schema import parse_line, parse_record
from specgraft.regen.sources import Read, read_source

USER = {"role": "user", "content": "x"}
OK = {"role": "assistant", "content": "ok"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}}


def write(path: Path, *rows: Any) -> Path:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode()) + b"\n" for row in rows))
    return path


def read(path: Path, **options: Any) -> Read:
    return read_source(SourceSection(path=str(path), **options))


def texts(record: dict[str, Any], **options: Any) -> list[tuple[str, str | None]]:
    return [(message["role"], message["content"]) for message in parse_record(record, **options).messages]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [USER]}, [("user", "x")]),
        ({"messages": [USER, OK, USER, OK]}, [("user", "x"), ("assistant", "ok"), ("user", "x"), ("assistant", "ok")]),
        ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "ok"}]}, [("user", "x"), ("assistant", "ok")]),
        ({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "x"}]}, [("system", "s"), ("user", "x")]),
        ({"conversations": [{"from": "human", "value": "x"}], "system": "s"}, [("system", "s"), ("user", "x")]),
        ({"instruction": "sum", "input": "1 2", "output": "3"}, [("user", "sum\n\n1 2"), ("assistant", "3")]),
        ({"instruction": "sum", "input": "", "output": ""}, [("user", "sum")]),
        ({"prompt": "x"}, [("user", "x")]),
        ({"prompt": [USER], "messages": None}, [("user", "x")]),
        ({"prompt": "x", "completion": "ok"}, [("user", "x"), ("assistant", "ok")]),
        ({"turns": ["x", "y"]}, [("user", "x"), ("user", "y")]),
    ],
)
def test_every_shape_becomes_the_same_messages(record: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert texts(record) == expected
    assert parse_line(json.dumps(record).encode()) == parse_record(record)


def test_tools_come_as_a_list_or_as_json_text() -> None:
    one, other = (parse_record({"messages": [USER], "tools": tools}) for tools in ([TOOL], json.dumps([TOOL])))
    assert one.tools == other.tools == (TOOL,)
    assert one.id == other.id


def test_a_foreign_role_needs_an_alias() -> None:
    record = {"messages": [{"role": "visitor", "content": "x"}, {"role": "my-model", "content": "ok"}]}
    with pytest.raises(ValueError, match=r"unknown role \"visitor\"; .*or name it in the source's `roles`"):
        parse_record(record)
    assert texts(record, roles={"visitor": "user", "my-model": "assistant"}) == [("user", "x"), ("assistant", "ok")]


def test_language_and_domain_of_the_source_stand_in() -> None:
    bare, named = {"prompt": "x"}, {"prompt": "x", "language": "ko", "domain": "code"}
    assert [(p.language, p.domain) for p in (parse_record(bare), parse_record(bare, language="ja", domain="math"))] == [
        ("und", "chat"),
        ("ja", "math"),
    ]
    assert (parse_record(named, language="ja").language, parse_record(named, domain="math").domain) == ("ko", "code")


def test_r8_bad_rows_are_listed_with_their_reasons_and_good_rows_stay(tmp_path: Path) -> None:
    good = [{"id": f"good{n}", "messages": [{"role": "user", "content": f"question {n}"}, OK]} for n in range(4)]
    odd: dict[str, Any] = {
        "opens with assistant": {"messages": [OK, USER]},
        "my-model": {"messages": [USER, {"role": "my-model", "content": "ok"}]},
        "token ids without messages": {"input_ids": [1, 2, 3], "loss_mask": [0, 1]},
        "bad JSON": b'{"messages": [',
        "not UTF-8": b'{"prompt": "\xe9"}',
        "holds image_url": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "id 'good0' is already on line 1": {"id": "good0", "messages": [USER]},
        "end with the user turn": {"messages": [{"role": "system", "content": "s"}]},
        "tools is a string that is not JSON": {"messages": [USER], "tools": "f(n)"},
        "a system text beside messages that hold one": {"system": "a", "messages": [{"role": "system", "content": "b"}, USER]},
        "instruction and input must be strings": {"instruction": ["a"]},
        "not a JSON object": b"3",
    }
    fine = [{"id": "two users", "messages": [USER, USER]}, {"id": "last is user", "messages": [USER, OK, USER]},
            {"id": "system", "messages": [{"role": "system", "content": "s"}, USER]}]  # fmt: skip
    found = read(write(tmp_path / "a.jsonl", *good, *odd.values(), b"", *fine))
    assert [prompt.id for prompt in found.prompts] == [f"a/good{n}" for n in range(4)] + ["a/two users", "a/last is user", "a/system"]
    assert [row.line for row in found.rejected] == list(range(5, 5 + len(odd)))
    for row, reason in zip(found.rejected, odd, strict=True):
        assert reason in row.reason and "\n" not in row.reason
    assert found.rows == len(found.prompts) + len(found.rejected) == 4 + len(odd) + len(fine)


def test_a_file_of_only_bad_rows_is_refused_with_the_first_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "x"}, {"messages": [OK]})
    with pytest.raises(ValueError, match=r"a.jsonl: none of 2 rows can be used; the first, line 1: no messages; give") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="none of 0 rows can be used"):
        read(write(tmp_path / "b.jsonl"))
    with pytest.raises(ValueError, match="no such file; give the path of a JSONL or Parquet file"):
        read(tmp_path / "c.jsonl")
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path)


def test_ids_begin_with_the_name_of_the_source_and_named_families_are_shared(tmp_path: Path) -> None:
    rows = [{"id": 0, "prompt": "x"}, {"id": 1, "family": "f", "prompt": "y"}]
    one, other = read(write(tmp_path / "a.jsonl", *rows)), read(write(tmp_path / "b.jsonl", *rows), name="other")
    assert [p.id for p in one.prompts + other.prompts] == ["a/0", "a/1", "other/0", "other/1"]
    assert [p.family for p in one.prompts + other.prompts] == ["a/0", "f", "other/0", "f"]


def test_a_limit_reads_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"id": n, "prompt": str(n)} for n in range(9)))
    assert [prompt.id for prompt in read(path, limit=3).prompts] == ["a/0", "a/1", "a/2"]


def test_the_built_in_set_is_a_source() -> None:
    found = read_source(SourceSection(path="builtin", limit=12), 0, ["en", "ko", "fr"], ["code", "tool"])
    assert [(p.language, p.domain) for p in found.prompts] == [("en", "code"), ("en", "tool"), ("ko", "code"), ("ko", "tool")] * 3
    assert all(p.id.startswith(f"builtin/{p.family}-") for p in found.prompts) and found.rows == 12
    with pytest.raises(ValueError, match="none of which the mix asks for: remove it"):
        read_source(SourceSection(path="builtin"), 0, ["fr"], ["code"])


def test_parquet_rows_are_as_those_of_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the package pyarrow")
    import pyarrow.parquet as parquet

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
    rows = [
        {"id": "a", "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "7"}],
         "tools": json.dumps([TOOL])},
        {"id": "b", "messages": [USER, OK], "tools": None},
        {"id": "c", "messages": [OK], "tools": None},
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    table, lines = read(tmp_path / "a.parquet"), read(write(tmp_path / "a.jsonl", *rows))
    assert table.prompts == lines.prompts and len(table.prompts) == 2
    assert table.rejected == lines.rejected
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"bad.parquet: cannot be read as Parquet \("):
        read(tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match="no such file"):
        read(tmp_path / "none.parquet")


@pytest.mark.parametrize(("path", "package"), [("a.parquet", "pyarrow"), ("hf:owner/name", "datasets")])
def test_a_missing_package_is_one_line(path: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"needs the package {package}, which is not installed: pip install {package}"):
        read_source(SourceSection(path=path))


def test_a_dataset_is_asked_for_its_split_and_runs_no_code_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, **options: Any) -> list[dict[str, Any]]:
        asked.append((name, options))
        if name == "no/such":
            raise FileNotFoundError("no such\ndataset")
        return [{"id": n, "prompt": f"q{n}", "messages": None} for n in range(3)]

    package = types.SimpleNamespace(__version__="4.1.0", load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", package)
    assert [p.id for p in read_source(SourceSection(path="hf:owner/name:test", limit=2)).prompts] == ["owner-name-test/0", "owner-name-test/1"]
    read_source(SourceSection(path="hf:owner/name"))
    assert asked == [("owner/name", {"split": "test"}), ("owner/name", {"split": "train"})]
    with pytest.raises(ValueError, match=r"hf:no/such: cannot be loaded \(no such dataset\); check the name"):
        read_source(SourceSection(path="hf:no/such"))
    package.__version__ = "2.19.0"
    with pytest.raises(ValueError, match="may run code of the hub; install datasets 3 or newer"):
        read_source(SourceSection(path="hf:owner/name"))
