"""Records: tokens, traits, algorithms, the registry, hyperparameters, the pipeline."""

import pickle
import subprocess
import sys

import attrs
import pytest
import torch
from torch import Tensor

import relax_core as rc
from relax_core import rewards
from relax_core.algorithm import Algorithm
from relax_core.algorithms import stages
from tests.core.ranks import f64, on_ranks

GRPO, GDPO = rc.get_algorithm("grpo"), rc.get_algorithm("gdpo")


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_tokens_know_their_geometry() -> None:
    tokens = rc.Tokens(torch.tensor([2, 0, 3]), torch.tensor([1, 0, 1, 1, 0]).bool())
    assert (tokens.num_samples, tokens.num_tokens) == (3, 5)
    assert tokens.sample_of.tolist() == [0, 0, 2, 2, 2]
    assert tokens.position.tolist() == [0, 1, 0, 1, 2]
    assert tokens.valid.tolist() == [1, 0, 2]
    assert tokens.offsets == (0, 2, 2, 5)
    assert tokens.token_slice(1, 3) == slice(2, 5)
    part = tokens.select(0, 2)
    assert (part.lengths.tolist(), part.mask.tolist()) == ([2, 0], [True, False])


def test_padded_and_back() -> None:
    tokens, values = rc.Tokens.full([2, 0, 3]), torch.arange(1.0, 6.0)
    padded = tokens.to_padded(values, fill=-1.0)
    assert padded.tolist() == [[1, 2, -1], [-1, -1, -1], [3, 4, 5]]
    assert torch.equal(tokens.from_padded(padded), values)
    wider = torch.nn.functional.pad(padded, (0, 4), value=float("nan"))
    assert torch.equal(tokens.from_padded(wider), values)
    assert rc.Tokens.full([]).to_padded(torch.zeros(0)).shape == (0, 0)


@pytest.mark.parametrize(
    ("lengths", "mask", "message"),
    [([2, 2], [1] * 5, "add up to 4 tokens, but the mask has 5"), ([3, -1], [1, 1], "sample 1 has -1 tokens")],
)
def test_tokens_that_cannot_be(lengths: list[int], mask: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rc.Tokens(torch.tensor(lengths), torch.tensor(mask).bool())


def test_tokens_check_types_shapes_and_ranges() -> None:
    tokens = rc.Tokens.full([2, 3])
    with pytest.raises(TypeError):
        rc.Tokens(torch.tensor([2.0]), torch.ones(2).bool())
    with pytest.raises(TypeError):
        rc.Tokens(torch.tensor([2]), torch.ones(2))
    with pytest.raises(ValueError, match="4 values for 5 tokens"):
        tokens.to_padded(torch.zeros(4))
    with pytest.raises(ValueError, match="2 x 2, but the batch has 2 samples of up to 3"):
        tokens.from_padded(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"samples 1\.\.3 are not within"):
        tokens.token_slice(1, 3)


# --- traits and algorithms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ratio_level", "word"),
        ("advantage_normalization", None),
        ("normalize_advantages", True),
        ("normalize_rewards", "forbidden"),
        ("needs_critic", "no"),
        ("needs_critic", 1),
        ("min_group_size", 0),
        ("min_group_size", 2.0),
        ("loss_metrics", ["ppo_kl"]),
        ("component_names", ["reward"]),
    ],
)
def test_traits_outside_their_set_name_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}.*{value!r}".replace("[", r"\[")):
        rc.Traits(**{field: value})


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        ({"normalize_advantages": "forbidden", "advantage_normalization": "token_global"}, "'token_global', but"),
        ({"ratio_level": "sequence"}, "needs_full_log_probs is False"),
        ({"component_names": ("reward", "length")}, "reads_components is True"),
        ({"component_names": ("length",), "reads_components": True}, "begins with 'reward'"),
        ({"component_names": ("reward", "luck"), "reads_components": True}, r"cannot have \['luck'\]; known are"),
    ],
)
def test_traits_that_contradict_each_other(traits: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rc.Traits(**traits)


def test_an_undeclared_trait_is_what_grpo_has() -> None:
    assert GRPO.traits == rc.Traits()


def test_stages_must_be_importable_by_name() -> None:
    def inner(*_: object, **__: object) -> None: ...

    for stage in (inner, lambda *_, **__: None, stages.ppo_clip.__call__):
        with pytest.raises(ValueError, match="mine: policy_loss must be a module-level function"):
            attrs.evolve(GRPO, name="mine", policy_loss=stage)
    with pytest.raises(ValueError, match="mine: hyperparameters must be an attrs class"):
        attrs.evolve(GRPO, name="mine", hyperparameters=dict)


@pytest.mark.parametrize("name", rc.ALGORITHMS)
def test_a_record_travels_between_processes(name: str) -> None:
    algorithm = rc.get_algorithm(name)
    assert algorithm.name == name
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert pickle.loads(pickle.dumps(algorithm.hyperparameters())) == algorithm.hyperparameters()
    tokens = pickle.loads(pickle.dumps(rc.Tokens.full([2, 3])))
    assert tokens.offsets == (0, 2, 5)
    assert pickle.loads(pickle.dumps(rc.split_by([1, 2]))) == rc.split_by([1, 2])


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown algorithm 'gdp0': known are grpo, .*did you mean 'gdpo'"):
        rc.get_algorithm("gdp0")


# --- hyperparameters ------------------------------------------------------------------------------------------------


def test_hyperparameters_are_documented_and_equal_names_mean_equal_things() -> None:
    seen: dict[str, object] = {}
    for algorithm in rc.ALGORITHMS.values():
        for field in attrs.fields(algorithm.hyperparameters):
            assert field.metadata["help"].endswith((".", ")."))
            meaning = (field.type, field.metadata["help"])
            assert seen.setdefault(field.name, meaning) == meaning


@pytest.mark.parametrize(
    "wrong",
    [
        {"eps_clip": -0.1},
        {"eps_clip": 1.1},
        {"eps_clip": "0.2"},
        {"eps_clip": True},
        {"eps_clip": float("nan")},
        {"eps_clip": None},
        {"eps_clip_high": -1.0},
        {"eps_clip_high": float("inf")},
        {"eps_clip_c": 1.0},
        {"disable_grpo_std_normalization": 1},
    ],
)
def test_hyperparameters_outside_their_range_name_field_and_value(wrong: dict[str, object]) -> None:
    [(field, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"{field} must be .*got {value!r}"):
        GRPO.hyperparameters(**wrong)


def test_a_discount_is_no_hyperparameter_of_an_outcome_algorithm() -> None:
    for name, algorithm in rc.ALGORITHMS.items():
        if name not in ("ppo", "reinforce_plus_plus"):
            with pytest.raises(TypeError, match="gamma"):
                algorithm.hyperparameters(gamma=0.9)


def test_group_scale_can_be_switched_off() -> None:
    matrix, groups = f64([[1.0], [3.0]]), torch.tensor([0, 0])
    plain = GRPO.hyperparameters(disable_grpo_std_normalization=True)
    assert GRPO.normalize_rewards(plain, matrix, groups).tolist() == [-1.0, 1.0]


# --- pipeline -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "gdpo"])
def test_pipeline_is_its_stages(name: str) -> None:
    torch.manual_seed(6)
    matrix, groups = torch.rand(6, 1 + (name == "gdpo")).double(), torch.tensor([0, 1, 0, 1, 0, 1])
    tokens = rc.Tokens.full([1, 2, 3, 1, 0, 2])
    log_probs = (-torch.rand(9)).requires_grad_()
    old = log_probs.detach() - 0.1
    outcome = rc.pipeline(name, segment=rc.split_by([2, 4]))(matrix, groups, tokens, log_probs, old)
    algorithm = rc.get_algorithm(name)
    hyperparameters = algorithm.hyperparameters()
    scores = algorithm.normalize_rewards(hyperparameters, matrix, groups)
    estimate = algorithm.estimate_advantages(hyperparameters, scores, tokens, segment=rc.split_by([2, 4]))
    loss = algorithm.policy_loss(hyperparameters, log_probs, old, estimate.advantages.float(), tokens)
    weights = rc.reducers.sample_mean(tokens)
    assert torch.equal(outcome.scores, scores)
    assert torch.equal(outcome.advantages, estimate.advantages)
    assert torch.equal(outcome.loss, rc.reducers.weighted_sum(loss.loss, weights))
    assert outcome.metrics["ppo_kl"].item() == pytest.approx(-0.1, rel=1e-5)
    outcome.loss.backward()
    assert log_probs.grad.any()


def test_pipeline_normalizes_advantages_where_required_or_wanted() -> None:
    tokens, log_probs = rc.Tokens.full([2, 1, 3, 2]), torch.zeros(8)
    matrix, groups = f64([[0.0], [1.0], [0.5], [0.2]]), torch.tensor([0, 0, 1, 1])
    required = rc.pipeline("reinforce_plus_plus_baseline")(matrix, groups, tokens, log_probs)
    plain = rc.pipeline("grpo")(matrix, groups, tokens, log_probs)
    wanted = rc.pipeline("grpo", normalize_advantages=True)(matrix, groups, tokens, log_probs)
    scores = torch.tensor([-0.5, 0.5, 0.15, -0.15])[tokens.sample_of]
    torch.testing.assert_close(required.advantages, (scores - scores.mean()) / scores.std(correction=0))
    torch.testing.assert_close(required.returns, scores)
    assert torch.equal(wanted.advantages, rc.advantages.whiten(plain.advantages, tokens))
    assert wanted.carries_signal.tolist() == [True, True]
    for name, normal in (("gdpo", True), ("reinforce_plus_plus", False)):
        with pytest.raises(ValueError, match=f"normalize_advantages is {normal}"):
            rc.pipeline(name, normalize_advantages=normal)


def test_what_one_rank_cannot_estimate_raises_on_every_rank() -> None:
    def run(scores: Tensor, reduce: rc.collectives.Reduce) -> rc.Advantages:
        return rc.pipeline("reinforce_plus_plus", reduce=reduce).advantages(scores, rc.Tokens.full([2, 1]))

    errors, world = on_ranks([torch.zeros(2), torch.zeros(3)], run)
    assert all("3 values for 2 samples" in str(error) for error in errors)
    assert world.collectives == 1


def test_pipeline_sums_the_critics_loss() -> None:
    """Squares 0.25 and 4, the second clipped at 0.2 from 1: 3.24 is the smaller. Of masked tokens nothing."""
    tokens = rc.Tokens(torch.tensor([1, 2]), torch.tensor([1, 1, 0]).bool())
    values, old, nan = torch.tensor([0.5, 3.0, 0.0]), torch.tensor([0.5, 1.0, 0.0]), float("nan")
    run = rc.pipeline("ppo")
    loss, metrics = run.value_loss(values, old, torch.tensor([0.0, 1.0, nan]), tokens, run.weights(tokens))
    assert loss.item() == pytest.approx((0.25 + 4) / 2)
    assert metrics["value_clipfrac"].item() == 0.0
    with pytest.raises(ValueError, match="grpo has no value_loss: it trains no critic"):
        rc.pipeline("grpo").value_loss(values, old, old, tokens, run.weights(tokens))


def test_a_micro_batch_counts_scalar_metrics_by_its_share() -> None:
    tokens, log_probs = rc.Tokens.full([2]), torch.tensor([0.5, -0.5])
    run = rc.pipeline("m2po")
    arguments = log_probs, torch.zeros(2), torch.tensor([1.0, -1.0]), tokens, run.weights(tokens)
    assert run.loss(*arguments)[1]["m2"].item() == pytest.approx(0.25)
    assert run.loss(*arguments, share=0.5)[1]["m2"].item() == pytest.approx(0.125)


def test_pipeline_wraps_the_loss() -> None:
    tokens, log_probs, entropy = rc.Tokens.full([1, 1]), torch.zeros(2), torch.tensor([1.0, 3.0])
    matrix, groups = f64([[0.0], [1.0]]), torch.tensor([0, 0])
    wrapped = rc.pipeline("grpo")(
        matrix,
        groups,
        tokens,
        log_probs,
        wrap=lambda loss: rc.corrections.with_entropy(loss, entropy, tokens, coef=0.5),
    )
    plain = rc.pipeline("grpo")(matrix, groups, tokens, log_probs)
    assert wrapped.loss.item() == pytest.approx(plain.loss.item() - 1.0)
    assert wrapped.metrics["entropy"].item() == 2.0


def test_pipeline_refuses_another_algorithms_hyperparameters() -> None:
    with pytest.raises(TypeError, match="gdpo takes Hyperparameters"):
        rc.pipeline("gdpo", GRPO.hyperparameters())
    assert isinstance(rc.pipeline(GRPO).algorithm, Algorithm)


# --- imports --------------------------------------------------------------------------------------------------------

UNIMPORTABLE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "megatron", "transformers", "tensordict", "transfer_queue", "numpy_is_fine"}:
            raise ImportError(f"{name} must not be imported")
sys.meta_path.insert(0, Refuse())
if "break" in sys.argv:
    import transformers
import time, torch
before, started = set(sys.modules), time.perf_counter()
import relax_core
seconds = time.perf_counter() - started
relax_core.pipeline("gdpo").scores(torch.rand(4, 2).double(), torch.zeros(4, dtype=torch.long))
tops = lambda names: {name.split(".")[0] for name in names}
allowed = {"relax_core", "jaxtyping", "beartype", "attrs", "attr", "wadler_lindig", *sys.stdlib_module_names}
print(sorted(tops(sys.modules) - tops(before) - allowed), seconds)
"""


def test_import_needs_torch_jaxtyping_beartype_and_attrs_only() -> None:
    run = subprocess.run([sys.executable, "-c", UNIMPORTABLE], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("[]"), run.stdout


def test_the_import_test_can_fail() -> None:
    run = subprocess.run([sys.executable, "-c", UNIMPORTABLE, "break"], capture_output=True, text=True, check=False)
    assert "transformers must not be imported" in run.stderr


def test_public_names() -> None:
    for name in rc.__all__:
        assert hasattr(rc, name)
    assert rewards.group_ids is rc.rewards.group_ids


def test_only_one_kl_term_can_be_required_and_only_one_that_is_allowed_has_an_estimator() -> None:
    with pytest.raises(ValueError, match="reward_kl and kl_loss are both 'required'"):
        rc.Traits(reward_kl="required", kl_loss="required")
    with pytest.raises(ValueError, match="kl_estimator is 'k2', but every KL term is 'forbidden'"):
        rc.Traits(reward_kl="forbidden", kl_loss="forbidden", kl_estimator="k2")
