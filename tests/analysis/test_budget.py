"""The owner's limits: reservations of runs, and refusals that name limit, value and a fitting change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from toprope.analysis.budget import Account, Demand, demand_of, freeze_limits
from toprope.errors import InvalidValue
from toprope.records.run.kinds import KINDS
from toprope.records.run.usage import Usage
from toprope.settings.limits import FrozenLimits, Limits
from toprope.settings.schema import Config

DEMAND = Demand(steps=1000, processors=4, train_s=3600.0, beside_s=1200.0)


def limits(tmp_path: Path, text: str) -> Limits:
    file = tmp_path / "limits.yaml"
    file.write_text(text)
    return Limits.read(file)


def account(run_id="other", live=True, reserved=None, used=None, **usage):
    return Account(run_id, live, True, Usage(**usage), used or {}, reserved or {})


def test_limits_reserve_budget_of_run(tmp_path):
    found = freeze_limits(limits(tmp_path, "per_day: {cpu_hours: 20}"), DEMAND, [])
    assert isinstance(found, FrozenLimits)
    # 3600 + 1200 s of wall time on 4 processors.
    assert found.reserved == {"cpu_hours": pytest.approx(4 * 4800 / 3600)}
    assert found.caps["cpu_hours"].limit == "per_day.cpu_hours"


def test_live_reservations_and_usage_today_count_together(tmp_path):
    owner = limits(tmp_path, "per_day: {cpu_hours: {max: 10, reason: Nights are loud.}}")
    live = account(reserved={"cpu_hours": 4.0}, used={"cpu_hours": 1.0}, cpu_s=3600.0)
    ended = account("old", live=False, reserved={"cpu_hours": 9.0}, used={"cpu_hours": 2.0})
    # The live run used 1 and reserves 3 more, the ended one used 2: 4 are left, and this run needs 5.33.
    [refusal] = freeze_limits(owner, DEMAND, [live, ended])
    assert refusal.limit == "per_day.cpu_hours"
    assert "10 CPU-hours" in refusal.text and str(tmp_path / "limits.yaml") in refusal.text
    assert "Nights are loud" in refusal.text and "4 are left" in refusal.text
    assert "budget.max_train_seconds of at most 2400 fits" in refusal.fits
    fits = Demand(steps=1000, processors=4, train_s=2400.0, beside_s=1200.0)
    assert isinstance(freeze_limits(owner, fits, [live, ended]), FrozenLimits)
    tighter = Demand(steps=1000, processors=4, train_s=2401.0, beside_s=1200.0)
    assert isinstance(freeze_limits(owner, tighter, [live, ended]), list)


def test_seconds_that_fit_leave_money_for_calls(tmp_path):
    owner = limits(tmp_path, "per_day: {cost_usd: 5}\nprices: {cpu_hour_usd: 0.1}")
    run = Demand(steps=1000, processors=4, train_s=90_000.0, beside_s=1200.0, tokens_usd=3.0)
    [refusal] = freeze_limits(owner, run, [])
    assert refusal.fits == "budget.max_train_seconds of at most 16800 fits."
    assert isinstance(freeze_limits(owner, replace(run, train_s=16_800.0), []), FrozenLimits)
    [refusal] = freeze_limits(owner, replace(run, tokens_usd=10.0), [])
    assert "may cost 10 USD a run: a smaller budget.steps" in refusal.fits
    [refusal] = freeze_limits(owner, replace(run, tokens_usd=0.001, beside_s=500_000.0), [])
    assert "Too little is left today" in refusal.fits, "no fewer calls would help"
    [refusal] = freeze_limits(owner, replace(run, tokens_usd=10.0, steps=None), [])
    assert "a smaller sft.tasks or sft.epochs" in refusal.fits


def test_less_time_fits_for_fine_tuning_too(tmp_path):
    owner, config = limits(tmp_path, "per_day: {cpu_hours: 10}"), Config()
    config.budget.max_train_seconds = 36_000.0
    tuned = demand_of(config, KINDS["sft"], processors=4, gpu=None)
    [refusal] = freeze_limits(owner, tuned, [])
    assert "budget.max_train_seconds of at most" in refusal.fits
    test = replace(demand_of(config, KINDS["test"], processors=4, gpu=None), train_s=36_000.0)
    [refusal] = freeze_limits(owner, test, [])
    assert "Too little is left today" in refusal.fits


def test_limits_count_every_run_of_a_group(tmp_path):
    owner = limits(tmp_path, "per_day: {cpu_hours: 12}\nconcurrent_runs: 2")
    found = freeze_limits(owner, DEMAND, [], 3)
    assert {refusal.limit for refusal in found} == {"per_day.cpu_hours", "concurrent_runs"}
    assert "At most 2 more fit" in next(one for one in found if one.limit == "concurrent_runs").fits


def test_unbounded_run_reserves_rest_of_day(tmp_path):
    endless = Demand(steps=1000, processors=4)
    found = freeze_limits(limits(tmp_path, "per_day: {cpu_hours: 10}"), endless, [account(used={"cpu_hours": 4.0})])
    assert found.reserved == {"cpu_hours": 6.0} and found.caps["cpu_hours"].value == 6.0
    [refusal] = freeze_limits(limits(tmp_path, "per_day: {cpu_hours: 10}\nper_run: {wall_hours: 48}"), endless, [])
    assert "max_train_seconds" in refusal.fits


def test_cost_limit_requires_price(tmp_path):
    text = "per_day: {cost_usd: 5}\nprices: {cpu_hour_usd: 0.1, gpu_hour_usd: {A100: 1.5}}"
    owner = limits(tmp_path, text)
    on_cpu = freeze_limits(owner, DEMAND, [])
    assert on_cpu.reserved["cost_usd"] == pytest.approx(4 * 4800 / 3600 * 0.1)
    gpu = Demand(steps=1, processors=4, gpu="NVIDIA H100 80GB HBM3", train_s=60.0, beside_s=1200.0)
    [refusal] = freeze_limits(owner, gpu, [])
    assert "NVIDIA H100" in refusal.text and "prices.gpu_hour_usd" in refusal.text
    known = Demand(steps=1, processors=4, gpu="NVIDIA A100-SXM4", train_s=60.0, beside_s=1140.0)
    assert freeze_limits(owner, known, []).reserved["cost_usd"] == pytest.approx((4 * 0.1 + 1.5) / 3)
    nothing = freeze_limits(limits(tmp_path, "per_run: {cost_usd: 5}"), DEMAND, [])
    assert "prices.cpu_hour_usd" in nothing[0].text


def test_cost_reservation_is_bounded_by_run_cap(tmp_path):
    text = "per_run: {cost_usd: 0.2}\nper_day: {cost_usd: 1}\nprices: {cpu_hour_usd: 0.1}"
    found = freeze_limits(limits(tmp_path, text), DEMAND, [])
    assert found.reserved == {"cost_usd": 0.2} and found.caps["cost_usd"].limit == "per_run.cost_usd"


def test_limits_on_steps_daily_runs_and_disk(tmp_path):
    text = "per_run: {steps: 500, disk_gb: 2}\nper_day: {runs: 1}\ndisk_gb: 3"
    found = freeze_limits(limits(tmp_path, text), DEMAND, [account(live=False, disk_bytes=int(1.5e9))])
    by_limit = {refusal.limit: refusal for refusal in found}
    assert set(by_limit) == {"per_run.steps", "per_day.runs", "disk_gb"}
    assert by_limit["per_run.steps"].fits == "", "fewer steps would not start either"
    [alone] = freeze_limits(limits(tmp_path, "per_run: {steps: 500}"), DEMAND, [])
    assert alone.fits == "budget.steps of at most 500 fits."
    room = freeze_limits(limits(tmp_path, "disk_gb: 3"), DEMAND, [account(live=False, disk_bytes=int(1e9))])
    assert room.caps["disk_gb"].value == pytest.approx(2.0) and room.caps["disk_gb"].together == 3
    room = freeze_limits(limits(tmp_path, "disk_gb: 3"), DEMAND, [account(live=False, disk_bytes=int(1e9))], 4)
    assert room.caps["disk_gb"].value == pytest.approx(0.5), "runs that start together share what is left"


def test_gpu_price_is_that_of_longest_matching_name(tmp_path):
    prices = limits(tmp_path, 'prices: {gpu_hour_usd: {H100: 2, "H100 80GB": 3, "*": 1}}').prices
    assert [prices.of_gpu(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "T4", "")] == [3, 2, 1, 1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("per_run: {wall_hour: 3}", "wall_hours"),
        ("concurrent_runs: many", "concurrent_runs must be a number"),
        ("per_day: {cost_usd: -1}", "at least 0"),
        ("confirm: sometimes", "never, always"),
        ("confirm: {above: {money: 1}}", "money"),
        ("prices: {gpu_hour_usd: {H100: free}}", "gpu_hour_usd.H100"),
        ("concurrent_runs: {max: 3, why: because}", "why"),
    ],
)
def test_invalid_limits_file_is_refused(tmp_path, text, says):
    with pytest.raises(InvalidValue, match=says):
        limits(tmp_path, text)


def test_shipped_limits_are_valid_and_need_no_consent():
    shipped = Limits.read(Path(__file__).resolve().parents[2] / "configs" / "limits.yaml", owners=False)
    assert shipped.confirm == "never"
    assert isinstance(freeze_limits(shipped, DEMAND, []), FrozenLimits)


def test_a_run_that_costs_nothing_starts_when_the_money_of_the_day_is_spent(tmp_path):
    owner = limits(tmp_path, "per_day: {cost_usd: 5}\nprices: {cpu_hour_usd: 0}")
    found = freeze_limits(owner, DEMAND, [account(used={"cost_usd": 6.0})])
    assert isinstance(found, FrozenLimits) and found.caps["cost_usd"].value == found.reserved["cost_usd"] == 0
    # A run without a bound takes what is left, which is nothing.
    endless = Demand(steps=1000, processors=4)
    [refusal] = freeze_limits(owner, endless, [account(used={"cost_usd": 6.0})])
    assert refusal.limit == "per_day.cost_usd"
