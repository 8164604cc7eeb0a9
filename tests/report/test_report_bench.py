"""The section about an engine: sentences first, then every cell."""

from __future__ import annotations

from specgraft.report.bench import bench
from specgraft.report.read import found
from specgraft.report.stage import report
from specgraft.run_dir import RunDir, write_json

ROW = {
    "model": "f32", "drafter": "none", "temperature": 0.0, "concurrency": 1, "tokens_per_second": 30.0, "accept_length": None,
    "accept_length_pooled": None, "step_ms": 33.3, "first_ms": {"median": 100.0, "p95": 150.0}, "token_ms": {"median": 33.0, "p95": 40.0},
}  # fmt: skip
SPEC = ROW | {
    "drafter": "dspark", "speedup": 0.81, "accept_length": 1.9, "accept_length_pooled": 1.8, "break_even": 2.3, "step_ms": 76.6,
    "lossless": {"prompts": 50, "differ": 1, "ties": 1}, "model_check": {"model": 0.80, "measured": 0.81, "difference": -0.0123},
}  # fmt: skip


def test_a_run_without_a_benchmark_has_no_such_section(tmp_path):
    assert bench(found(RunDir(tmp_path).create())) is None


def test_the_loss_is_said_first_and_every_cell_is_there(tmp_path):
    run = RunDir(tmp_path).create()
    said = [{"model": "f32", "drafter": "dspark", "low": 0.7, "high": 0.81, "text": "speculation loses everywhere <b>"}]
    settings = {"bench": {"engine": "llamacpp", "max_new_tokens": 64, "repeats": 3, "draft_tokens": 0}, "machine": "x86, 2 cores"}
    write_json(run.bench / "bench.json", {"settings": settings, "suites": {"mt": 8}, "said": said, "rows": [ROW, SPEC]})
    page = report(run).read_text()
    result = page[page.index('id="headline"') : page.index('id="bench"')]
    assert result.index("0.70x to 0.81x") < result.index("speculation loses everywhere &lt;b&gt;") < result.index("Accept length, T=0")
    section = page[page.index('id="bench"') :]
    for text in ("<svg", "49 of 50 the same, 1 of them ties", "0.81", "2.30", "1.80", "100 / 150", "33.0 / 40.0", "-1.2 %", "x86, 2 cores", "mt: 8"):
        assert text in section


def test_a_damaged_file_costs_its_section_only(tmp_path):
    run = RunDir(tmp_path).create()
    write_json(run.bench / "bench.json", {"rows": [{"model": "f32"}], "said": []})
    assert "This part could not be shown" in report(run).read_text()
