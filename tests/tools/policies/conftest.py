"""A home with ended runs that have weights of their own at each checkpoint."""

from __future__ import annotations

import pytest
from toprope_tools.workshop import Workshop

from tests.support.tiny_policy import make_tiny_policy
from tests.support.tools_house import make_workshop
from tests.tools.policies.house import trained


@pytest.fixture(scope="package")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("house")


@pytest.fixture(scope="package")
def shop(place):
    shop, launcher = make_workshop(place)
    shop.home.ensure()
    shop.home.configuration.mkdir(parents=True, exist_ok=True)
    yield shop
    launcher.close()


@pytest.fixture(scope="package")
def base(place):
    folder = place / "base"
    folder.mkdir()
    return make_tiny_policy(folder)


@pytest.fixture(scope="package")
def full(shop, base):
    return trained(shop, [2, 4], base=base)


@pytest.fixture(scope="package")
def adapted(shop, base):
    return trained(shop, [3], lora=True, base=base)


@pytest.fixture
def owner(shop, place, monkeypatch):
    """Writes the owner's settings, and makes commands use this home."""
    monkeypatch.setenv("TOPROPE_HOME", str(shop.home.path))
    monkeypatch.setenv("TOPROPE_CONFIG", str(shop.home.configuration))
    yield shop.home.settings_file.write_text
    shop.home.settings_file.unlink(missing_ok=True)


@pytest.fixture
def live(shop, owner):
    """The same home with real keepers."""
    return Workshop.open(shop.home)
