"""Lengths in tokens: as the embedded policy's tokenizer counts, from a model's folder, the Hub's cache, or a run."""

import shutil

import pytest

from tests.support.tools_house import make_workshop, start_run
from toprope.settings.schema import Config
from toprope.workbench.fit import TaskSample, misfits
from toprope.workbench.token_counts import counter_of

PHRASE = "Spell this word backward (example: sun -> nus): "


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_embedded_policies_are_counted_like_their_tokenizer(tmp_path):
    from toprope.training.policy.tiny_model import RECIPES, make_tokenizer

    counter = counter_of("embedded")
    made = make_tokenizer(RECIPES["embedded"])
    for text in (f"{PHRASE}table", "é", "two words", PHRASE * 2):
        ids = made.apply_chat_template(asked(text), add_generation_prompt=True, return_dict=False)
        assert counter.prompt(asked(text)) == len(ids) and counter.exact
    assert counter.text("abc") == 3


def test_model_on_this_machine_is_counted_by_its_own_file(tmp_path, tiny_policy, monkeypatch):
    counter = counter_of(str(tiny_policy))
    assert counter.text("Sort dbca.") > 0 and not counter.exact
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert counter_of("vendor/tiny") is None
    snapshot = tmp_path / "hub" / "models--vendor--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copy(tiny_policy / "tokenizer.json", snapshot)
    assert counter_of("vendor/tiny").text("Sort dbca.") == counter.text("Sort dbca.")
    (snapshot / "tokenizer.json").write_text("{")
    assert counter_of("vendor/tiny") is None
    config = Config()
    config.policy.model, config.policy.max_context, config.rollout.max_new_tokens = str(tiny_policy), 64, 8
    size = counter.text("x " * 200)
    [found] = misfits(config, TaskSample((tuple(asked("x " * 200)),), ()))[:1]
    assert found.rule == "context_too_short" and f"at least {size} tokens" in found.text


@pytest.mark.parametrize("model", ["embedded", "nothing-here"])
def test_policy_of_a_run_is_counted_like_the_one_it_began_with(tmp_path, model):
    shop, launcher = make_workshop(tmp_path)
    config = Config()
    config.policy.model = model
    first = start_run(shop, config=config)
    launcher.close()
    found = counter_of(f"run:{first.run_id}", shop.home.runs)
    assert (found is None) == (model != "embedded")
    assert counter_of("run:none", shop.home.runs) is None and counter_of(f"run:{first.run_id}") is None
