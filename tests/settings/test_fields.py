import re

import pytest

from toprope.errors import InvalidValue, LockedField, NotFound
from toprope.settings.changes import apply_changes
from toprope.settings.fields import all_fields, find_field, get_value, knob_fields
from toprope.settings.schema import SECTIONS, Config
from toprope.settings.sections.environment import EnvironmentSection, helper_names
from toprope.settings.sections.mixture import MixtureEntry, RewardFunction

KNOBS = [
    {
        "name": "min_word_len",
        "type": "int",
        "default": 3,
        "description": "shortest",
        "ge": 1,
        "le": 20,
        "choices": None,
    },
    {"name": "mode", "type": "choice", "default": "easy", "choices": ["easy", "hard"]},
    {"name": "seed", "type": "int | null", "default": None},
    {"name": "ratio", "type": "int | float", "default": 0.5, "le": 1},
    {"name": "names", "type": "list[str]", "default": ["a"]},
    {"name": "odd", "type": "any", "default": None},
    {"name": "either", "type": "int | str", "default": 1},
]


class FixedLock:
    def refusal(self, field, value):
        return f"{field} is kept" if field == "policy.model" and value != "embedded" else None


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("optimizer.learning_rate", "1e-5", 1e-5),
        ("optimizer.learning_rate", 1e-5, 1e-5),
        ("optimizer.max_grad_norm", 2, 2.0),
        ("rollout.group_size", "16", 16),
        ("rollout.group_size", 16.0, 16),
        ("rollout.group_size", " 16 ", 16),
        ("rollout.group_size", "1e2", 100),
        ("policy.lora", "true", True),
        ("policy.lora", "False", False),
        ("policy.lora", True, True),
        ("budget.max_train_seconds", "null", None),
        ("budget.max_train_seconds", None, None),
        ("budget.max_train_seconds", "12.5", 12.5),
        ("policy.revision", "None", None),
        ("policy.revision", "main", "main"),
        ("policy.dtype", "BFLOAT16", "bfloat16"),
        ("rollout.stop", '["a", "b"]', ["a", "b"]),
        ("rollout.stop", [], []),
        ("environment.reward_weights", '{"exact": "0.5"}', {"exact": 0.5}),
        ("environment.reward_weights", {"exact": 1}, {"exact": 1.0}),
        ("environment.knobs.min_word_len", "5", 5),
        ("environment.knobs.mode", "hard", "hard"),
        ("environment.knobs.seed", "null", None),
        ("environment.knobs.seed", "7", 7),
        ("environment.knobs.ratio", "0.25", 0.25),
        ("environment.knobs.names", '["x"]', ["x"]),
        ("environment.knobs.odd", '{"a": 1}', {"a": 1}),
        ("environment.knobs.odd", "plain", "plain"),
    ],
)
def test_value_is_read_by_type_of_field(name, given, expected):
    result = find_field(name, all_fields(KNOBS)).coerce(given)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("rollout.group_size", 8.5, "a whole number"),
        ("rollout.group_size", "8.5", ">= 2 and <= 1024"),
        ("rollout.group_size", True, "a whole number"),
        ("rollout.group_size", 1, ">= 2"),
        ("rollout.group_size", 1025, "<= 1024"),
        ("rollout.group_size", "1_0", "a whole number"),
        ("rollout.group_size", None, "a whole number"),
        ("rollout.group_size", "eight", '"eight"'),
        ("rollout.group_size", [8], "a whole number"),
        ("optimizer.learning_rate", 0, "> 0"),
        ("optimizer.learning_rate", "nan", "a number"),
        ("optimizer.learning_rate", "inf", "a number"),
        ("optimizer.learning_rate", True, "a number"),
        ("policy.lora", 1, "true or false"),
        ("policy.lora", "yes", "true or false"),
        ("policy.model", "", "not empty"),
        ("policy.model", 5, "a text"),
        ("policy.dtype", "fp8", "auto, float32, bfloat16, float16"),
        ("policy.lora_dropout", 1, "< 1"),
        ("budget.max_train_seconds", 0, "or null"),
        ("rollout.stop", "abc", "a list"),
        ("rollout.stop", '["a", 1]', "a list"),
        ("rollout.stop", ["a"] * 9, "at most 8"),
        ("environment.reward_weights", "[1]", "an object"),
        ("environment.reward_weights", {"a": "b"}, "an object"),
        ("environment.knobs.min_word_len", 0, ">= 1"),
        ("environment.knobs.mode", "middle", "easy, hard"),
        ("environment.knobs.ratio", 1.5, "<= 1"),
        ("environment.knobs.either", None, "a JSON value"),
        ("environment.knobs.seed", 1e300, "a whole number"),
        ("algorithm.scale_rewards", None, "none"),
    ],
)
def test_invalid_value_is_refused_with_accepted_ones(name, given, says):
    with pytest.raises(InvalidValue) as refused:
        find_field(name, all_fields(KNOBS)).coerce(given)
    assert name in str(refused.value)
    assert says in str(refused.value)


def test_every_schema_field_accepts_its_default():
    fields = all_fields()
    count = sum(len(info.annotation.model_fields) for info in Config.model_fields.values())
    assert len(fields) == count - 1  # environment.knobs stands for the environment's own
    for name, field in fields.items():
        assert field.description, name
        assert field.type_text
        assert name.partition(".")[0] in SECTIONS
        if field.default != "":
            assert field.coerce(field.default) == field.default, name
        assert get_value(Config(), field) == field.default


def test_list_of_choices_accepts_only_these():
    field = all_fields()["logging.trackers"]
    assert field.coerce('["trackio"]') == ["trackio"] == field.coerce(["trackio"])
    for wrong in (["wandb"], "trackio", [1]):
        with pytest.raises(InvalidValue, match="logging.trackers"):
            field.coerce(wrong)


def test_default_of_knob_may_be_out_of_bounds():
    field = knob_fields([{"name": "size", "type": "int", "default": 0.5, "ge": 1}])["environment.knobs.size"]
    assert field.coerce(0.5) == 0.5
    with pytest.raises(InvalidValue):
        field.coerce(0.25)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("optimizer.learning_rat", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("algorithm.learning_rate", "optimizer.learning_rate"),
        ("rollout.groupsize", "rollout.group_size"),
        ("rollout", "rollout.temperature"),
        ("environment.knobs.min_wordlen", "environment.knobs.min_word_len"),
        ("environment.knobs", "environment.knobs.mode"),
        ("", "get_config"),
    ],
)
def test_unknown_field_names_nearest(name, near):
    with pytest.raises(NotFound, match=near.replace(".", r"\.")):
        find_field(name, all_fields(KNOBS))


def test_edit_applies_all_changes_to_a_copy():
    config = Config()
    result, changed = apply_changes(
        config,
        {"optimizer.learning_rate": "1e-3", "rollout.group_size": 8, "environment.knobs.min_word_len": "4"},
        KNOBS,
    )
    assert (result.optimizer.learning_rate, result.environment.knobs) == (1e-3, {"min_word_len": 4})
    assert [(one.field, one.before, one.after) for one in changed] == [
        ("optimizer.learning_rate", 1e-6, 1e-3),
        ("environment.knobs.min_word_len", 3, 4),
    ]
    assert config == Config()


def test_edit_with_problems_changes_nothing_and_names_all():
    config = Config()
    with pytest.raises(InvalidValue) as refused:
        apply_changes(
            config,
            {
                "optimizer.learning_rate": 1e-3,
                "rollout.group_size": "8.5",
                "policy.model": "other",
                "nonsense.field": 1,
                "environment.name": "x",
            },
            KNOBS,
            FixedLock(),
        )
    text = str(refused.value)
    assert "4 problems" in text
    for part in ("rollout.group_size", "policy.model is kept", "nonsense.field", "select_environment"):
        assert part in text
    assert config == Config()


def test_error_class_follows_kind_of_problem():
    with pytest.raises(LockedField, match="is kept"):
        apply_changes(Config(), {"policy.model": "other"}, locks=FixedLock())
    with pytest.raises(NotFound):
        apply_changes(Config(), {"a.b": 1, "c.d": 2})


def test_wrong_type_of_locked_field_is_no_lock_violation():
    with pytest.raises(InvalidValue, match="policy.model: 5 is not a text") as refused:
        apply_changes(Config(), {"policy.model": 5}, locks=FixedLock())
    assert not isinstance(refused.value, LockedField)


def test_conflicts_are_judged_by_result_of_edit():
    with pytest.raises(InvalidValue, match="leaves no room"):
        apply_changes(Config(), {"rollout.max_new_tokens": 512})
    result, _ = apply_changes(Config(), {"rollout.max_new_tokens": 512, "policy.max_context": 1024})
    assert result.policy.max_context == 1024
    with pytest.raises(InvalidValue, match="does not divide"):
        apply_changes(Config(), {"optimizer.micro_batch_size": 7})


def test_old_conflict_does_not_block_other_edit():
    config = Config()
    config.rollout.max_new_tokens = 4096
    result, changed = apply_changes(config, {"rollout.temperature": 0.5})
    assert result.rollout.temperature == 0.5
    assert len(changed) == 1


@pytest.mark.parametrize(
    ("given", "kept"), [(True, "all"), (False, "none"), ("false", "none"), ("sample", "sample"), ("none", "none")]
)
def test_kept_rollouts_of_earlier_versions_are_read(given, kept):
    assert find_field("logging.keep_rollouts", all_fields()).coerce(given) == kept
    assert Config.model_validate({"logging": {"keep_rollouts": given}}).logging.keep_rollouts == kept
    with pytest.raises(InvalidValue, match="all, sample, none"):
        apply_changes(Config(), {"logging.keep_rollouts": "half"})


def test_helpers_are_judges_roles_and_the_opponent_once_each() -> None:
    section = EnvironmentSection(
        name="x",
        model_roles={"grader": "strict", "critic": "kind"},
        opponent="strong",
        rewards=[{"name": "style", "judge": "strict", "rubric": "Is it short?"}],
    )
    assert sorted(helper_names(section)) == ["kind", "strict", "strong"]
    assert helper_names(EnvironmentSection(name="x", opponent="base")) == []


def test_patterns_of_plain_objects_count_no_repetitions() -> None:
    """A counted class of all letters costs every process megabytes; its length is a limit of its own."""
    fields = [field for model in (RewardFunction, MixtureEntry) for field in model.model_fields.values()]
    patterns = [held.pattern for field in fields for held in field.metadata if getattr(held, "pattern", None)]
    assert len(patterns) == 3 and not [pattern for pattern in patterns if re.search(r"\{\d+,", pattern)]
    for name in ("a" * 65, "1x", "ok\n"):
        with pytest.raises(ValueError, match="name"):
            EnvironmentSection(name="x", rewards=[{"name": name, "judge": "strict", "rubric": "Is it short?"}])


def test_what_one_driver_does_alone_conflicts_with_several() -> None:
    config = Config()
    config.algorithm.deterministic = True
    assert not any("launcher.drivers" in one for one in config.conflicts())
    config.launcher.drivers = 2
    assert any("algorithm.deterministic needs one driver" in one for one in config.conflicts())
    config.algorithm.deterministic = False
    assert not config.conflicts()
    config.rollout.max_staleness = 0
    assert any("rollout.max_staleness 0 needs one driver" in one for one in config.conflicts())
    config.rollout.max_staleness = 8
    config.environment.curriculum = {"knob": "size", "levels": [1, 2]}
    assert any("environment.curriculum needs one driver" in one for one in config.conflicts())


def test_trainer_without_its_algorithm_is_refused_with_the_cure():
    config = Config()
    config.algorithm.trainer = "mine.py:Mine"
    [told] = [one for one in config.conflicts() if "algorithm.trainer" in one]
    assert 'set it to ""' in told


def test_kl_term_of_grpo_is_refused_with_ppo_in_favour_of_its_own():
    config, _ = apply_changes(Config(), {"algorithm.beta": 0.1})
    with pytest.raises(InvalidValue, match=r"algorithm.beta is 0.1, and algorithm.name ppo .* ppo.kl_coef"):
        apply_changes(config, {"algorithm.name": "ppo"})
    apply_changes(config, {"algorithm.name": "ppo", "ppo.kl_coef": 0.1, "algorithm.beta": 0})
