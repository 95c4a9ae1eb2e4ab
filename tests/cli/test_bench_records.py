"""jax-ep bench --compare: its errors for files that are not records."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from jax_ep._cli import main
from support.commands import record, write

DEEP = "[" * 100_000
BAD = [
    ("", "Expecting value"),
    (b"\xff\xfe\x00", "can't decode byte 0xff"),
    ('{"kind": "p2p"', "Expecting ',' delimiter"),
    (DEEP, "recursion"),
    ("[1]", "must be an object of kind 'p2p'"),
    ('{"kind": "soak"}', "must be an object of kind 'p2p'"),
    ('{"kind": "p2p"}', "count must be a whole number of at least 0, got nothing"),
    *(
        (("us", text), f"results[0].us must be a finite number above 0, got {got}")
        for text, got in [
            *((each, each) for each in ("0", "-1", "0.0", "[1]", "{}")),
            ('"100"', "'100'"),
            *(("NaN", "nan"), ("Infinity", "inf"), ("1e999", "inf")),
            *(("null", "None"), ("true", "True"), ("1" + "0" * 400, "1000")),
        ]
    ),
    (("results", "5"), "results must be a list, got 5"),
    (("results", '{"a": 1}'), "results must be a list, got {'a': 1}"),
    (("results", "[1, 2]"), "results[0] must be an object, got 1"),
    (("results", '[{"us": 1}]'), "results[0].op must be a line of text, got nothing"),
    (("flags", '["a"]'), "results[0].flags must be a line of text, got ['a']"),
    (("num_sms", "{}"), "results[0].num_sms must be a whole number"),
    (("tokens", "null"), "results[0].tokens must be a whole number"),
    (("zero_tail", "[]"), "results[0].zero_tail must be true or false, got []"),
    (("wrong", '"no"'), "results[0].wrong must be true or false, got 'no'"),
    (("commit", "null"), "commit must be a line of text, got None"),
    (("device", r'"\ud800"'), r"device must be a line of text, got '\ud800'"),
    (("date", r'"a\nb"'), r"date must be a line of text, got 'a\nb'"),
    (("dtype", "[" * 50 + "]" * 50), "dtype must be a line of text, got [[[["),
    (("count", "true"), "count must be a whole number of at least 0, got True"),
]


def spoilt(name, text):
    """A record's text with `text` as the value of its, or its row's, entry `name`."""
    made = record(dispatch=100) | {"dtype": "bfloat16"}
    owner = made if name in made else made["results"][0]
    owner[name] = "HERE"
    return json.dumps(made).replace('"HERE"', text)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("content", "message"), BAD, ids=range(len(BAD)))
def test_compare_wants_records(tmp_path, capsys, content, message, which):
    good, bad = write(tmp_path / "a.json", record(dispatch=100)), tmp_path / "b.json"
    content = spoilt(*content) if isinstance(content, tuple) else content
    bad.write_bytes(content.encode() if isinstance(content, str) else content)
    paths = [str(bad), good] if which == 0 else [good, str(bad)]
    assert main.main(["bench", "--compare", *paths]) == 2
    said = capsys.readouterr()
    assert (len(said.err.splitlines()), said.out) == (1, "")
    assert f"must name two records: got {str(bad)!r}: " in said.err
    assert message in said.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"us": 200}, "'combine 128 uniform p2p'"),
        ({"wrong": True}, "'combine 128 uniform p2p'"),
        ({"format": "bf16"}, "'combine 128 uniform p2p'"),  # the default, explicitly
        ({"format": "mxfp8"}, None),
        ({"tokens": 64}, None),
        ({"us": None}, None),
    ],
)
def test_compare_wants_each_case_once(change, words, tmp_path, capsys):
    """A record with two times of one case is refused: either may be the valid one."""
    twice = record(dispatch=100, combine=50)
    twice["results"].append(twice["results"][1] | change)
    if change == {"us": None}:
        del twice["results"][2]["us"]  # a case that could not be measured
    bad, good = tmp_path / "a.json", write(tmp_path / "b.json", record(dispatch=100))
    write(bad, twice)
    status = main.main(["bench", "--compare", good, str(bad)])
    said = capsys.readouterr()
    if words is None:
        assert (status, said.err) == (0, "")
        return
    assert (status, said.out, len(said.err.splitlines())) == (2, "", 1)
    must = "results[2] must be a case of its own, got that of results[1], "
    assert f"got {str(bad)!r}: {must}{words}; write one" in said.err


@pytest.mark.parametrize("name", ["none.json", ".", "", "a\0b"])
def test_compare_wants_files(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good = write(tmp_path / "a.json", record(dispatch=100))
    assert main.main(["bench", "--compare", good, name]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert f"got {name!r}: " in said


def test_compare_prints_what_the_terminal_cannot_show(tmp_path, monkeypatch):
    path = write(tmp_path / "a.json", record(dispatch=100) | {"device": "Gerät"})
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert main.main(["bench", "--compare", path, path]) == 0
    assert rb"4 x Ger\xe4t," in shown.buffer.getvalue()


FULL = record(dispatch=100) | {"hidden": 8, "dtype": "b", "experts": 8, "top_k": 2}
FULL["results"][0] |= {"flags": "a", "format": "bf16", "wrong": False}
PLACES = [(FULL, name) for name in FULL] + [
    (FULL["results"][0], name) for name in FULL["results"][0]
]
# Includes lone surrogates, unlike the default of text strategies: JSON may have them.
TEXT = st.text(st.characters(exclude_categories=()))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), max_size=3))
def test_compare_of_whatever_json_never_raises(tmp_path_factory, changes):
    made = copy.deepcopy(FULL)
    row = made["results"][0]
    for (owner, name), value in changes:
        (made if owner is FULL else row)[name] = value
    folder = tmp_path_factory.getbasetemp()
    before, after = write(folder / "a.json", FULL), write(folder / "b.json", made)
    for paths in ((before, after), (after, before), (after, after)):
        said = io.StringIO()
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(said),
        ):
            code = main.main(["bench", "--compare", *paths])
        assert code in (0, 1, 2)
        assert len(said.getvalue().splitlines()) == (code == 2)
