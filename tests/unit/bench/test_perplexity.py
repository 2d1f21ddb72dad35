"""The quality guard: what each stored form costs the demo model on texts that it knows."""

from pathlib import Path

import pytest

from tests.bench.perplexity import FORMS, PLAIN, Form, known_ids, measure

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(demo_folder: Path) -> float:
    return measure(PLAIN, demo_folder)


def test_the_model_knows_the_texts(base: float, demo_folder: Path) -> None:
    assert sum(map(len, known_ids(demo_folder))) > 300
    assert 1 < base < 5


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_costs_what_its_bits_cost(form: Form, base: float, demo_folder: Path) -> None:
    ratio = measure(form, demo_folder) / base
    print(f"{form.name}: {ratio:.4f} times float32's perplexity of {base:.3f}")
    assert form.least <= ratio <= form.most
