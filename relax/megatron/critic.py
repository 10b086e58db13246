"""The critic: a model of the policy's shape that tells, at each response token, how good the response was before it."""

from collections.abc import Callable, Mapping

import attrs
from torch import Tensor, nn

from relax.data.samples import Sequences
from relax.megatron.batch import PaddedBatch
from relax.megatron.batching import Batching
from relax.megatron.layout import Layout
from relax.megatron.learner import Learner, Update
from relax.megatron.model import ModelConfig, PolicyModel, drawn
from relax.megatron.optimizer import OptimizerConfig

PREFIX = "critic."
ValueLossFunction = Callable[["ValueBatch"], tuple[Tensor, Mapping[str, Tensor]]]


@attrs.frozen
class ValueBatch:
    """Samples `start` to `stop` of the batch, with the values of their response tokens: [tokens]."""

    start: int
    stop: int
    values: Tensor


class ValueHead(nn.Linear):
    """One number from each hidden state, called as Megatron calls an output layer. Starts at 0: it knows nothing."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(  # type: ignore[override]  # Megatron's output layers return their bias beside the product
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        return super().forward(hidden), None


class ValueModel(PolicyModel):
    """The policy's body under a `ValueHead`. Every tensor-parallel rank holds the whole head."""

    def __init__(self, config: ModelConfig, layout: Layout) -> None:
        super().__init__(attrs.evolve(config, tie_embeddings=False), layout)
        if self.post_process:
            self.output_layer = ValueHead(config.hidden_size, 1, bias=False)

    def read(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Values, [selected]."""
        values: Tensor = self.output_layer(hidden)[0]
        return values.flatten().float()


class Critic(Learner[ValueModel]):
    """A `ValueModel` and its optimizer. The value of a token is that of what stands before it."""

    def __init__(
        self, model_config: ModelConfig, optimizer_config: OptimizerConfig, *, seed: int, batching: Batching
    ) -> None:
        model = drawn(ValueModel, model_config, seed)
        super().__init__(model, model_config, optimizer_config, batching=batching, prefix=PREFIX)

    def start_from(self, policy: PolicyModel) -> None:
        """Takes over the policy's body: what it knows of the texts."""
        body = {name: value for name, value in policy.state_dict().items() if not name.startswith("output_layer")}
        self.model.load_state_dict(body, strict=False)
        self._optimizer.reload_model_params()  # where it steps copies of the weights in a higher precision

    def values(self, sequences: Sequences) -> Tensor:
        """Values of all response tokens, back to back, without gradient."""
        (values,) = self._forward(sequences, lambda _, read: (read,), self._ddp, outputs=1)
        return values

    def update(self, sequences: Sequences, loss: ValueLossFunction) -> Update:
        """One optimizer step, as `Trainer.update` takes it."""

        def share(batch: PaddedBatch, read: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            return loss(ValueBatch(batch.start, batch.stop, read))

        return self._update(sequences, share)
