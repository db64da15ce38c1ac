"""The tiers of tests name tests that exist, and `make test` runs what it must."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tiers import FULL, SLOW, tier_of

TESTS = Path(__file__).parent


@pytest.mark.parametrize("entry", [*SLOW, *FULL])
def test_each_entry_is_a_module_or_a_test(entry: str) -> None:
    module, _, test = entry.partition("::")
    assert re.search(rf"^def {test}\(" if test else "", (TESTS / module).read_text(encoding="utf-8"), re.MULTILINE)


def test_no_entry_is_listed_twice() -> None:
    assert len({*SLOW, *FULL}) == len(SLOW) + len(FULL)


def test_make_test_checks_contract_order_and_golden_files() -> None:
    for module in ("test_contract.py", "test_elastic_order.py", "test_resume.py", "test_golden.py"):
        assert tier_of(f"tests/{module}") != "full"


def test_a_test_in_a_slow_module_may_be_full() -> None:
    assert tier_of("tests/test_elastic_order.py::test_workers_that_are_not_forked_give_the_same_batches[a]") == "full"
    assert tier_of("tests/test_elastic_order.py::test_epochs_differ_and_hold_no_batch_twice[b]") == "slow"
    assert tier_of("tests/plan/test_subset.py::test_any") is None
