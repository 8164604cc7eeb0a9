"""The mix benchmark: every number that the JSON promises, on a small folder; its second opinion sees faults that are planted."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from specgraft.config import RunConfig
from specgraft.regen.mix import draw
from specgraft.regen.near_duplicates import gram_sets, similar_pairs, units

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from mix_oracle import naive_grams, naive_units, runs_shared, similarities  # noqa: E402

SHARED = ROOT.parent / "shared" / "data"


def words(number: int) -> str:
    found = hashlib.sha256(str(number).encode()).hexdigest().translate(str.maketrans("0123456789", "ghijklmnop"))
    return " ".join(found[place : place + 4] for place in range(0, 64, 4))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    number = 0
    for language in ("en", "ko", "ja"):
        for domain in ("chat", "code", "math", "tool"):
            rows = []
            for place in range(24):
                number += 1
                text = words(number if place else number + 1)  # the first two of each file are copies
                rows.append({"id": str(place), "family": f"f{number}", "language": language, "domain": domain,
                             "messages": [{"role": "user", "content": text}]})  # fmt: skip
            (tmp_path / "train").mkdir(exist_ok=True)
            (tmp_path / "train" / f"{language}_{domain}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bench").mkdir()
    item = {"id": "q", "family": "q", "language": "en", "domain": "chat", "messages": [{"role": "user", "content": words(5)}]}
    (tmp_path / "bench" / "suite.jsonl").write_text(json.dumps(item) + "\n")
    return tmp_path


def test_the_benchmark_runs_and_keeps_its_promises(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "mix.py"), str(data), "--train", "40", "--held-out", "4", "--json", str(out), "--mixes", "files"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(out.read_text())["files"]
    assert "train: 40 of 40 prompts" in done.stdout
    assert found["same_in_another_process"] and found["removed"] == 12 and found["compared"] == 12 * 24 - 1
    assert [hit["suite_id"] for hit in found["contaminated"]] == ["q"]
    assert found["quota"]["missing"] == 0 and found["quota"]["largest_off_in_a_split"] <= 2
    opinion = found["second_opinion"]
    assert opinion.pop("highest_similarity_across") < 0.1
    assert opinion == {"prompts": 44, "ids_distinct": True, "families_crossing": 0, "pairs_crossing": 0, "near_duplicates_left": 0,
                       "removed_wrongly": 0, "contaminated_left": {"suite": []}}  # fmt: skip


@pytest.mark.parametrize("text", ["1,250.5 and 3 x12 snake_case", "안녕 world 하세요 3회", "東京タワー は ﾀﾜｰ・々", "ΣΑΣ ß ½ ²", "กรุงเทพ ၁၂ ភាសា", ""])
def test_two_ways_to_units_agree(text: str) -> None:
    assert naive_units(text) == units(text)
    assert naive_units(text, mask=False) == units(text, mask_numbers=False)


def test_the_second_opinion_sees_a_pair_and_a_shared_run() -> None:
    texts = [words(1), words(2), " ".join([*words(1).split()[:13], "other", "last", "words"])]
    records = {str(n): {"messages": [{"role": "user", "content": text}]} for n, text in enumerate(texts)}
    found = {place: list(row) for place, row in similarities([naive_grams(record) for record in records.values()])}
    assert found[2] == [11 / 17, 0.0]
    assert [(pair.first, pair.second, pair.shared, pair.union) for pair in similar_pairs(gram_sets(texts), 0.6)] == [(0, 2, 11, 17)]
    suite = {"q": {"messages": [{"role": "user", "content": f"so {texts[0]}"}]}}
    assert [hit["id"] for hit in runs_shared(records, suite, 13)] == ["0", "2"]
    assert [hit["id"] for hit in runs_shared(records, suite, 14)] == ["0"]


@pytest.mark.skipif(not (SHARED / "train").is_dir(), reason="needs the prompts of shared/data")
def test_a_mix_of_6400_prompts_meets_its_quotas_and_keeps_families_apart() -> None:
    """The floor of the data issue; `benchmarks/mix.py` has the second opinion on near-duplicates and contamination."""
    sources = [{"path": str(path)} for path in sorted((SHARED / "train").glob("*.jsonl"))]
    weights = {"languages": {"en": 0.84, "ko": 0.09, "ja": 0.07}, "domains": {"chat": 0.27, "code": 0.27, "math": 0.235, "tool": 0.225}}
    part = {"sources": sources, "train": 6000, "held_out": 400, "suites": [str(path) for path in (SHARED / "bench").glob("*.jsonl")], **weights}
    mix = draw(RunConfig.model_validate({"prompts": part}))
    drawn = [prompt for prompts in mix.prompts.values() for prompt in prompts]
    assert len(drawn) == len({prompt.id for prompt in drawn}) == 6400
    for axis, shares in (("language", weights["languages"]), ("domain", weights["domains"])):
        counts = Counter(getattr(prompt, axis) for prompt in drawn)
        assert all(abs(counts[name] - 6400 * share) <= 0.01 * 6400 * share for name, share in shares.items())
    family = {}
    for path in (SHARED / "train").glob("*.jsonl"):
        for line in path.read_text("utf-8").split("\n"):
            if line:
                record = json.loads(line)
                family[f"{path.stem}/{record['id']}"] = record["family"]
    train, heldout = ({family[prompt.id] for prompt in mix.prompts[split]} for split in ("train", "heldout"))
    assert not train & heldout
    assert mix.report["contaminated"] == [] and mix.report["rejected"] == []
