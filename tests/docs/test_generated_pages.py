"""The generated pages follow from records and docstrings: what is committed is what would be written."""

import re
from pathlib import Path

import attrs
import pytest

from relax.catalogue import Entry
from relax.documentation.algorithms import algorithm_page
from relax.documentation.example import example
from relax.documentation.markdown import linked
from relax.documentation.pages import outdated, pages, write
from relax.errors import RelaxError
from relax_core import ALGORITHMS, rewards
from tests.docs.copied import ROOT, Copy
from tests.test_readme import EXAMPLE

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    return pages()


def test_the_committed_pages_are_up_to_date(wanted: dict[str, str]) -> None:
    assert outdated(DOCS, wanted) == [], "run: python -m relax.documentation"


def test_edited_missing_and_stray_pages_are_outdated_until_written(tmp_path: Path, wanted: dict[str, str]) -> None:
    write(tmp_path)
    (tmp_path / "guide.md").write_text("not a generated page")
    (tmp_path / "traits.md").write_text("edited")
    (tmp_path / "algorithms" / "grpo.md").unlink()
    (tmp_path / "reference" / "gone.md").write_text("of a module that is no more")
    expected = ["algorithms/grpo.md", "reference/gone.md", "traits.md"]
    assert outdated(tmp_path, wanted) == expected
    assert write(tmp_path) == [tmp_path / name for name in expected]
    assert outdated(tmp_path, wanted) == []
    assert (tmp_path / "guide.md").is_file()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_has_all_that_one_asks(name: str, wanted: dict[str, str]) -> None:
    page, entry = wanted[f"algorithms/{name}.md"], Entry.of(ALGORITHMS[name])
    assert f"\n# {name}\n" in page
    assert f"[{name}]({name}.md)" in wanted["algorithms/index.md"]
    assert entry.papers
    assert all(f"(https://arxiv.org/abs/{paper.removeprefix('arXiv:')})" in page for paper in entry.papers)
    assert "\n## When to use it\n\nUse it " in page
    for flag in entry.hyperparameters:
        assert re.search(rf"^\| `{flag.flag}` \| \S.* \| \S.* \|$", page, re.MULTILINE)
    for trait in entry.traits:
        assert re.search(rf"^\| `{trait}` \| \S.* \| \S.* \|$", page, re.MULTILINE)
    for step in ("rewards → scores", "scores → advantages", "advantages → loss", "tokens → weights"):
        assert re.search(rf"^### {step}\n\n\S", page, re.MULTILINE)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_an_example_that_is_run(name: str) -> None:
    """`tests/test_readme.py` runs what this pattern finds, and compares what is printed."""
    (shown,) = EXAMPLE.finditer((DOCS / "algorithms" / f"{name}.md").read_text(encoding="utf-8"))
    assert f'relax_core.pipeline("{name}"' in shown["code"]
    assert set(re.findall(r"^(?:import|from) (\w+)", shown["code"], re.MULTILINE)) == {"torch", "relax_core"}
    assert re.match(r"scores +\[.*\d.*\]\nadvantages \[.*\d.*\]\ngradient +\[.*[1-9].*\]\n", shown["output"])


def test_the_example_of_clip_cov_shows_a_choice() -> None:
    (shown,) = EXAMPLE.finditer((DOCS / "algorithms" / "clip_cov.md").read_text(encoding="utf-8"))
    assert re.search(r"^gradient .*\d, 0\.0, 0\.\d+\]$", shown["output"], re.MULTILINE)


def test_links_lead_to_what_there_is(wanted: dict[str, str]) -> None:
    for name, text in wanted.items():
        for target in re.findall(r"\]\(([^)#:]+\.md)", text):
            assert ((DOCS / name).parent / target).is_file(), f"{name} links to {target}"


def test_names_in_backticks_become_links_where_they_exist() -> None:
    link = "(../reference/rewards.md#relax_core.rewards.decoupled)"
    assert linked("`rewards.decoupled`") == f"[`rewards.decoupled`]{link}"
    assert linked("`relax_core.rewards.decoupled`") == f"[`relax_core.rewards.decoupled`]{link}"
    assert linked("`rewards.nothing` and `eps_clip`") == "`rewards.nothing` and `eps_clip`"


def test_an_example_that_does_not_run_says_whose_and_what_to_do() -> None:
    def broken(hyperparameters: object, reward_matrix: object, groups: object) -> object:
        return rewards.named_components(reward_matrix, "one", "two", "three")[0]

    algorithm = attrs.evolve(ALGORITHMS["grpo"])
    object.__setattr__(algorithm, "normalize_rewards", broken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS, "grpo", algorithm)
        with pytest.raises(RelaxError, match=r"grpo.*expected the reward components one, two, three.*'Example:'"):
            algorithm_page(algorithm)


def test_a_new_algorithm_gets_its_page(tmp_path: Path) -> None:
    copy = Copy.made(tmp_path)
    done = copy.python("-m", "relax.documentation", "pages")
    assert done.returncode == 0, done.stderr
    assert "pages/algorithms/duel.md" in done.stdout.splitlines()
    page = (tmp_path / "pages" / "algorithms" / "duel.md").read_text(encoding="utf-8")
    for part in ("arxiv.org/abs/2503.14286", "Use it for rewards of which", "`--duel-ratio-cap` | 1.0 |", "gradient  "):
        assert part in page
    assert "[duel](duel.md)" in (tmp_path / "pages" / "algorithms" / "index.md").read_text(encoding="utf-8")


def test_lines_of_an_algorithms_own_take_the_place_of_those_that_assign_to_the_same_name() -> None:
    own = ["rewards = torch.ones(6, 1)", "log_probs = torch.zeros(9, requires_grad=True)", "x = 1"]
    entry = attrs.evolve(Entry.of(ALGORITHMS["grpo"]), example="\n".join(own))
    lines = example(entry, ALGORITHMS["grpo"]).splitlines()
    assert [line for line in lines if line.startswith(("rewards = ", "log_probs = ", "x = "))] == own
    assert lines.index("x = 1") < lines.index('grpo = relax_core.pipeline("grpo")')
    assert "# reward, greedy" in example(Entry.of(ALGORITHMS["remax"]), ALGORITHMS["remax"])
