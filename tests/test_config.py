"""The run file: what is accepted, what is refused, and that a refusal is one line that names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import specgraft
from specgraft.config import RunConfig
from specgraft.run_file import load_config, parse_override, validate

REPOSITORY = Path(__file__).resolve().parents[1]
RUN_FILES = [*sorted((REPOSITORY / "recipes").glob("*.toml")), Path(specgraft.__file__).parent / "pilot" / "pilot.toml"]


def refusal(path: Path | None = None, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_config(path, list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_run_files_of_the_project_parse(path: Path) -> None:
    config = load_config(path)
    target = "smollm2" if path.stem != "solar_open2" else "upstage/Solar-Open2-250B"
    assert config.run.name == path.stem and config.target.id == target


def test_defaults_are_valid_and_survive_a_round_trip() -> None:
    config = load_config(None)
    assert config == RunConfig() == RunConfig.model_validate(config.model_dump(mode="json"))
    assert config.drafters.draft_tokens == 7 and config.distill.decay == 4.0
    assert config.distill.weights("dspark") == {"ce": 0.1, "l1": 0.9, "confidence": 1.0}


def test_sections_are_frozen() -> None:
    with pytest.raises(ValueError):
        load_config(None).train.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("train.lrr=1", "train.lr"),
        ("train.step=3", "train.steps"),
        ("capture.tap=[1]", "capture.taps"),
        ("drafters.draft_token=4", "drafters.draft_tokens"),
        ("trian={}", "train"),
        ("evaluat.prompts=3", "evaluate"),
        ("train.draft_tokens=4", "drafters.draft_tokens"),
        ("lr=1", "train.lr"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_known_one(text: str, nearest: str) -> None:
    message = refusal(None, text)
    assert f"unknown key `{text.split('=')[0].split('.')[0]}" in message
    assert f"did you mean `{nearest}" in message


def test_an_unknown_key_like_no_other_lists_what_is_known() -> None:
    message = refusal(None, "export.qqqqqqq=1")
    assert "unknown key `export.qqqqqqq`" in message and "known here: export.to, export.dtype" in message
    assert "known here: run, target, prompts" in refusal(None, "qqqqqqq.zzzzzzzz=1")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train.lr=fast", ["train.lr", "number", '"fast"']),
        ("train.lr=-1", ["train.lr", "greater than 0", "-1"]),
        ("train.lr=nan", ["train.lr", "finite", "NaN"]),
        ("distill.ce=inf", ["distill.ce", "finite", "Infinity"]),
        ("drafters.head_dim=7", ["drafters.head_dim", "multiple of 2", "7"]),
        ('drafters.layer_types=["full_attention"]', ["drafters.layer_types", "1 layers for 5", "give one each"]),
        ("drafters={layer_types='sliding',sliding_window=7}", ["drafters.sliding_window=7", "larger than drafters.draft_tokens=7"]),
        ("train.steps=1.5", ["train.steps", "integer", "1.5"]),
        ("train.optimizer=sgd", ["train.optimizer", "'adamw' or 'muon'", '"sgd"']),
        ("train=3", ["train", "3"]),
        ("capture.taps=some", ["capture.taps", '"some"']),
        ('capture.taps=["a"]', ["capture.taps", '"a"']),
        ("train.betas=[0.9]", ["train.betas"]),
        ("run.name=../up", ["run.name", '"../up"']),
        ("run.name=", ["run.name", '""']),
        ("target.dtype=float8", ["target.dtype", '"float8"']),
        ("regen.top_p=0", ["regen.top_p", "0"]),
        ("prompts.languages={en=-1}", ["prompts.languages.en", "-1"]),
        ("drafters.warm_layers=[1,2]", ["drafters.warm_layers", "2 layers for 5"]),
        ("evaluate.prompts=101", ["evaluate.prompts=101", "prompts.held_out"]),
        ('drafters={warm_from="x",warm_fc="mean"}', ["drafters.warm_from", "warm_fc", 'to "none"']),
        ('drafters={warm_from="x",warm_layers="spread"}', ["drafters.warm_from", "warm_layers", 'to "none"']),
    ],
)
def test_wrong_values_are_refused_naming_key_and_value(text: str, parts: list[str]) -> None:
    message = refusal(None, text)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        ("train.lr=3e-4", ["train", "lr"], 3e-4),
        ("train.steps=12", ["train", "steps"], 12),
        ("distill.slot_sampling=true", ["distill", "slot_sampling"], True),
        ("capture.taps=[3, 15, 27]", ["capture", "taps"], [3, 15, 27]),
        ("capture.taps=spread", ["capture", "taps"], "spread"),
        ('run.name="a=b"', ["run", "name"], "a=b"),
        ("target.id=/models/a=b", ["target", "id"], "/models/a=b"),
        ("prompts.languages={ en = 0.5, ko = 0.5 }", ["prompts", "languages"], {"en": 0.5, "ko": 0.5}),
        ("prompts.languages.en=1", ["prompts", "languages", "en"], 1),
        (" train.lr =1.0", ["train", "lr"], 1.0),
    ],
)
def test_overrides_are_dotted_keys_with_toml_values(text: str, keys: list[str], value: Any) -> None:
    assert parse_override(text) == (keys, value)


@pytest.mark.parametrize("text", ["train.lr", "=3", "  =3"])
def test_an_override_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write section\.key=value"):
        parse_override(text)


def test_overrides_win_over_the_file_and_leave_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[train]\nlr = 1e-3\nsteps = 5\n[prompts.languages]\nen = 1.0\nko = 1.0\n[target]\nid = "x"\n')
    config = load_config(path, ["train.lr=2e-3", "prompts.languages.ko=0.25", "capture.taps=[0,2]", "target.id=org/model"])
    assert (config.train.lr, config.train.steps) == (2e-3, 5)
    assert config.prompts.languages == {"en": 1.0, "ko": 0.25}
    assert config.capture.taps == [0, 2] and config.target.id == "org/model"
    assert load_config(path).train.lr == 1e-3  # nothing is kept between calls


def test_the_last_of_two_equal_overrides_wins() -> None:
    assert load_config(None, ["train.steps=3", "train.steps=4"]).train.steps == 4


def test_an_override_through_a_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nseed = 1\n")
    assert "seed is not a section" in refusal(path, "run.seed.deep=2")


def test_bad_files_are_refused_naming_the_file(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[train\nlr = 1")
    assert str(bad) in refusal(bad) and "not valid TOML" in refusal(bad)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(binary)
    missing = tmp_path / "missing.toml"
    assert str(missing) in refusal(missing) and "no such run file" in refusal(missing)
    assert "is a folder" in refusal(tmp_path)
    assert "cannot be read" in refusal(bad / "below.toml")


def test_a_refusal_says_where_the_value_came_from(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nlr = -2\n")
    assert refusal(path).startswith(f"{path}: train.lr: ")
    with pytest.raises(ValueError, match=r"^here: train\.lr: "):
        validate({"train": {"lr": -2}}, "here")


# --- losses that a kind of drafter cannot take


LOSSES = ("ce", "kl", "rkl", "jsd", "tv", "l1", "lk_alpha", "lk_hybrid", "dpace", "e2e_tv", "selector", "confidence")
LABELLED = {"ce", "dpace", "selector"}  # branches have no labels of the text


def takes(kind: str, loss: str, slots: str) -> bool:
    """Whether a drafter of this kind can learn this loss and no other."""
    if slots == "rollouts":
        return loss in ("", "confidence")
    if slots == "branches" and loss in ("", "confidence", *LABELLED):
        return False
    return {"": False, "lk_hybrid": kind != "dflash2", "selector": kind == "dflash2", "confidence": kind == "dspark"}.get(loss, True)


@pytest.mark.parametrize("slots", ["references", "branches", "rollouts"])
@pytest.mark.parametrize("kind", ["mtp", "dflash", "dflash2", "dspark"])
def test_a_loss_that_a_drafter_cannot_take_is_refused_when_the_run_file_is_read(kind: str, slots: str) -> None:
    for loss in ("", *LOSSES):
        preset = "draft_opd" if slots == "rollouts" else "ce"
        alone = [f"distill.{name}={int(name == loss)}" for name in LOSSES]
        given = [f"drafters.kind={kind}", f"distill.preset={preset}", f"distill.slots={slots}", *alone]
        if takes(kind, loss, slots):
            assert loss in ("", *load_config(None, given).distill.weights(kind))
        else:
            message = refusal(None, *given)
            assert "distill" in message and (loss in message or not loss) and ("set" in message or "give" in message)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["drafters.kind=dflash2", "distill.lk_hybrid=0.5"], ["defaults: distill.lk_hybrid: ", "infinite for a selector's law", "set distill.lk_hybrid=0, and"]),
        (["drafters.kind=dflash2", "distill.preset=lk_hybrid"], ['defaults: distill.preset="lk_hybrid": ', "set distill.lk_hybrid=0, and lk_alpha"]),
        (["drafters.kind=dflash2", "distill.preset=specopd", "distill.lk_hybrid=1"], ["defaults: distill.lk_hybrid: "]),
        (["distill.selector=1"], ["defaults: distill.selector: a dspark drafter has no selector", 'drafters.kind="dflash2"']),
        (["distill.preset=dflash2_kl"], ['defaults: distill.preset="dflash2_kl": a dspark drafter has no selector', "set distill.selector=0"]),
        (["drafters.confidence=false", "distill.preset=ce", "distill.ce=0"], ["nothing to minimise for a dspark drafter, which has no confidence head; give"]),
        (["drafters.kind=mtp", "distill.ce=0"], ["nothing to minimise for a mtp drafter; give a loss a weight"]),
        (["distill.slot_sampling=true", "distill.preset=specopd"], ["defaults: distill.slot_sampling leaves slots out and e2e_tv"]),
    ],
)  # fmt: skip
def test_what_a_drafter_cannot_learn_is_named_with_the_remedy(overrides: list[str], parts: list[str]) -> None:
    message = refusal(None, *overrides)
    for part in parts:
        assert part in message


def test_losses_of_a_kind_that_is_not_ours_are_checked_once_it_is_built() -> None:
    assert load_config(None, ["drafters.kind=heads", "distill.selector=1"]).distill.selector == 1


def test_a_mistyped_sampling_key_of_a_domain_names_its_own_neighbour():
    with pytest.raises(ValueError, match=r"did you mean `regen\.by_domain\.chat\.temperature`\?"):
        load_config(None, ["regen.by_domain.chat.temp=0.5"])


def test_a_file_below_a_file_is_one_line(tmp_path):
    from specgraft.run_dir import write_text

    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out\.json: could not be written \((File exists|Not a directory)\); give another place"):
        write_text(tmp_path / "file" / "out.json", "x")


def test_a_target_that_is_not_loaded_needs_servers_and_references():
    outer = {"target": "outer", "servers": ["http://127.0.0.1:1"]}
    assert RunConfig.model_validate({"capture": outer}).capture.target == "outer"
    for data, said in (
        ({"capture": {"target": "outer"}}, "needs capture.servers"),
        ({"capture": outer, "drafters": {"warm_layers": "spread"}}, 'set drafters.warm_layers="none"'),
    ):
        with pytest.raises(ValueError, match=said):
            RunConfig.model_validate(data)
