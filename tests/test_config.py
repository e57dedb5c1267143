"""Configuration files and overrides: what is accepted, and that every mistake is told before any work, with its fix."""

import re
from pathlib import Path

import pytest
import yaml

from sapo_fast import config as config_module
from sapo_fast.config import Config, config_hash, load_config, to_yaml

ROOT = Path(__file__).parents[1]


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def mistake(path, overrides):
    with pytest.raises(ValueError) as caught:
        load_config(path, overrides)
    assert type(caught.value) is ValueError  # our words, not pydantic's
    return str(caught.value)


def test_defaults_file_and_overrides_are_laid_over_each_other(tmp_path):
    path = write(tmp_path, "seed: 4\noptim:\n  lr: 2e-5\n  epochs: 2\nwarm_start: {expert: {slip: 0.1}}\n")
    config = load_config(path, ["optim.epochs=3", "warm_start.expert.forget=0.2", "model.value_tokens=[7, 8]", "loss.v_clip=null"])
    assert (config.seed, config.optim.lr, config.optim.epochs, config.optim.weight_decay) == (4, 2e-5, 3, 0.01)
    assert config.warm_start.expert == {"slip": 0.1, "forget": 0.2}
    assert config.model.value_tokens == (7, 8)
    assert config.loss.v_clip is None
    assert load_config(None, []) == Config()


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "1E-6", ".000001", "0.000001", "+1e-6"])
def test_floats_as_people_write_them(tmp_path, text):
    # YAML 1.1 reads 1e-6 as text
    assert load_config(write(tmp_path, f"optim: {{lr: {text}}}"), []).optim.lr == 1e-6
    assert load_config(None, [f"optim.lr={text}"]).optim.lr == 1e-6


def test_a_configuration_made_in_python_is_as_strict():
    for wrong in ({"sed": 1}, {"optim": {"learning_rate": 1.0}}, {"seed": "1"}):
        with pytest.raises(ValueError):
            Config(**wrong)


def test_an_empty_file_and_an_empty_section_mean_the_defaults(tmp_path):
    assert load_config(write(tmp_path, "# nothing\n"), []) == Config()
    assert load_config(write(tmp_path, "optim:\n  # lr: 3\nseed: 1\n"), ["optim.lr=3"]).optim.lr == 3


def test_yaml_round_trip_is_exact(tmp_path):
    config = load_config(
        None, ["optim.lr=1.2345678901234567e-7", "model.value_tokens=[3,4]", "loss.dual_clip=null", "env.options={a: [1, x]}"]
    )
    assert load_config(write(tmp_path, to_yaml(config)), []) == config


def test_run_dir_fills_in_algorithm_and_seed():
    assert load_config(None, ["algorithm=grpo", "seed=5"]).run_dir() == Path("runs/grpo-5")
    assert "{rank}" in mistake(None, ["output_dir=runs/{rank}"])


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("sed=1", "'seed'"),
        ("optim.learning_rate=1", "'optim.lr'"),
        ("optm.lr=1", "'optim.lr'"),
        ("gamma=0.9", "'advantage.gamma'"),
        ("lr=1", "'optim.lr'"),
        ("optim.lr.x=1", "'optim.lr'"),
        ("loss.gamma=1", "'advantage.gamma'"),
    ],
)
def test_an_unknown_override_names_the_nearest_key(override, near):
    message = mistake(None, [override])
    assert f"unknown key '{override.split('=')[0]}'" in message and near in message


def test_unknown_keys_of_a_file_are_told_with_their_path_all_at_once(tmp_path):
    path = write(tmp_path, "sed: 1\noptim:\n  learning_rate: 3\n")
    message = mistake(path, [])
    assert message.splitlines() == [
        f"{path}: unknown key 'sed'; did you mean 'seed'?",
        f"{path}: unknown key 'optim.learning_rate'; did you mean 'optim.lr'?",
    ]
    assert "write 'optim:'" in mistake(write(tmp_path, "optim.lr: 1\n"), [])


def test_every_bad_value_gets_one_line_with_key_rule_value_and_default():
    message = mistake(
        None, ["optim.lr=-1", "seed=true", "algorithm=pppo", "optim.betas=[0.9, 1.0]", "model.value_tokens=[1]", "env.max_turns=0"]
    )
    lines = message.splitlines()
    assert len(lines) == 6
    assert "optim.lr must be a number > 0, got -1; the default is optim.lr=1e-06" in lines
    assert "seed must be a whole number >= 0, got True; the default is seed=0" in lines
    assert "env.max_turns must be a whole number >= 1, got 0; the default is env.max_turns=30" in lines
    assert any(line.startswith("algorithm must be one of sapo, ppo, ppo_token, grpo, got 'pppo'") for line in lines)
    assert any(line.startswith("optim.betas must be [a number >= 0 and < 1, a number >= 0 and < 1], got [0.9, 1.0]") for line in lines)
    assert any(line.startswith("model.value_tokens must be auto or") for line in lines)
    assert "errors.pydantic.dev" not in message


@pytest.mark.parametrize(
    "override",
    [
        "advantage.gamma=1.1",
        "advantage.lam=-0.1",
        "advantage.lam_v=2",
        "loss.tau_v=0",
        "loss.r_max=0",
        "loss.clip_low=-0.2",
        "loss.dual_clip=1",
        "rollout.temperature=0",
        "optim.lr=.nan",
        "optim.lr=.inf",
        "optim.lr='1e-6'",
        "iterations=2.0",
        "log.wandb=1",
        "model.device=gpu",
        "model.value_tokens=[5, 5]",
        "model.value_tokens=[-1, 5]",
        "warm_start.expert.slip=often",
        "checkpoint.keep=0",
        "eval.episodes=0",
    ],
)
def test_values_out_of_range_or_of_the_wrong_type_are_refused(override):
    assert override.split("=")[0].rsplit(".slip")[0] in mistake(None, [override])


def test_consistency_between_fields_is_checked_and_the_fix_is_right():
    message = mistake(None, ["algorithm=grpo", "episodes_per_iteration=30"])
    fix = re.search(r"set (episodes_per_iteration=\d+)", message)[1]
    assert load_config(None, ["algorithm=grpo", fix]).episodes_per_iteration == 32
    assert load_config(None, ["episodes_per_iteration=30"])  # the other algorithms have no groups
    assert "rollout.max_context_tokens" in mistake(None, ["rollout.max_response_tokens=2000"])


def test_repeated_and_conflicting_settings_are_refused(tmp_path):
    assert "'seed=2' and 'seed=1' set the same thing" in mistake(None, ["seed=1", "seed=2"])
    assert "set the same thing" in mistake(None, ["env.options={a: 1}", "env.options.a=2"])
    assert "line 3: key 'seed' is set again (first on line 1)" in mistake(write(tmp_path, "seed: 1\niterations: 2\nseed: 1\n"), [])
    assert "'lr' is set again" in mistake(write(tmp_path, "optim: {lr: 1.0, lr: 2.0}\n"), [])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optim={lr: 1}", "optim is a section"),
        ("seed", "key=value"),
        ("=3", "key=value"),
        ("optim.lr=[", "not valid YAML"),
    ],
)
def test_malformed_overrides(override, told):
    assert told in mistake(None, [override])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- 1\n", "must hold 'key: value' lines"),
        ("a: [\n", "not valid YAML"),
        ("1: 2\n", "keys must be text"),
        ("optim: 3\n", "optim must be a section"),
        ("x: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_malformed_files(tmp_path, text, told):
    assert told in mistake(write(tmp_path, text), [])


def test_a_missing_file_names_the_nearest_one(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").write_text("")
    (tmp_path / "configs" / "smoke.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert "did you mean configs/demo.yaml?" in mistake("configs/dmo.yaml", [])
    assert "did you mean configs/demo.yaml?" in mistake("demo.yml", [])
    assert "give the path of a YAML file" in mistake("/nowhere/qqqqqqqqqqqqqq", [])


def test_hash_follows_the_settings_and_nothing_else():
    base = config_hash(Config().warm_start, Config().env)
    assert base == config_hash(Config().warm_start, Config().env) and re.fullmatch("[0-9a-f]{16}", base)
    assert base != config_hash(Config().env, Config().warm_start)
    assert base != config_hash(load_config(None, ["warm_start.seed=1"]).warm_start, Config().env)
    assert config_hash({"a": 1, "b": 2}) == config_hash({"b": 2, "a": 1})


def test_every_setting_says_what_it_means():
    missing = [key for key, field in config_module.fields() if not field.description]
    assert not missing
    assert len(list(config_module.fields())) > 60


def test_the_reference_page_is_up_to_date_and_whole():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == config_module.reference_page(), "run: python -m sapo_fast.config > docs/configuration.md"
    plain = yaml.safe_load(to_yaml(Config()))
    for key, _ in config_module.fields():
        section, _, name = key.rpartition(".")
        row = re.search(rf"^\| `{re.escape(key)}` \| `(.*?)` \|", page, re.M)
        assert row, key
        assert yaml.safe_load(row[1]) == (plain[section][name] if section else plain[name]), key


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configurations_that_we_ship_are_valid(path):
    load_config(str(path), [])
