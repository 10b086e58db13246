"""Samples per second of one GRPO step, here and in TRL's GRPOTrainer, in turn on the same machine.

    python benchmarks/trl_grpo.py [--trl-python OTHER_ENVIRONMENT/bin/python] [--rounds 3] [--prompt-tokens 16]

TRL 1.16 is an optional extra: `pip install "trl==1.16.*" datasets accelerate`, in this environment or in one of its
own. The work: a Qwen3 of 4 layers x 128 (4 heads, 2 key-value heads, MLP 384), 32 prompts x 8 responses x 24 new tokens
(none ends early), one optimizer step on all 256 samples; new prompts at every step. Each side runs in a process of its
own, the two take turns, and a side's time is that of its median step over all rounds. Both sample with a key-value
cache, score, whiten in groups, and clip the ratio, the whole batch at once; TRL is given what speeds it up here: no
checkpoints, no logging, no gradient checkpointing. Threads of both wait for work as torch has them wait, unless the
environment says how.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time

GROUPS, GROUP_SIZE, NEW_TOKENS, WORDS = 32, 8, 24, 96
SAMPLES = GROUPS * GROUP_SIZE


def draw_prompts(count: int, tokens: int) -> list[list[int]]:
    """The same random prompts for both sides."""
    generator = random.Random(0)
    return [[generator.randrange(WORDS) for _ in range(tokens)] for _ in range(count)]


def run_relax(steps: int, prompt_tokens: int) -> list[float]:
    """Seconds of each step: sampling, advantages, loss, optimizer."""
    import torch

    from relax.data.samples import Sequences
    from relax.megatron.batching import Batching
    from relax.megatron.model import ModelConfig
    from relax.megatron.optimizer import OptimizerConfig
    from relax.megatron.runtime import megatron_process
    from relax.megatron.trainer import MicroBatch, Trainer
    from relax.rollout.megatron_engine import MegatronEngine
    from relax_core import get_algorithm

    grpo = get_algorithm("grpo")
    hyperparameters = grpo.hyperparameters()
    prompts = draw_prompts(steps * GROUPS, prompt_tokens)
    groups = torch.arange(GROUPS).repeat_interleave(GROUP_SIZE)
    times = []
    with megatron_process(0):
        trainer = Trainer(
            ModelConfig(vocab_size=WORDS + 2),
            OptimizerConfig(total_steps=steps, lr=1e-3),
            seed=0,
            batching=Batching(micro_batch_size=SAMPLES),
        )
        engine = MegatronEngine([WORDS + 2])  # an id that is never drawn
        engine.update_weights(trainer)
        for step in range(steps):
            start = time.perf_counter()
            places = range(step * GROUPS, (step + 1) * GROUPS)
            drawn = prompts[places.start : places.stop]
            answers = engine.generate(drawn, n=GROUP_SIZE, max_new_tokens=NEW_TOKENS, temperature=1.0, seeds=places)
            completions = [completion for group in answers for completion in group]
            rewards = torch.tensor([[float(sum(completion.token_ids) % 7)] for completion in completions])
            sequences = Sequences(
                tuple(tuple(prompt) for prompt in drawn for _ in range(GROUP_SIZE)),
                tuple(completion.token_ids for completion in completions),
            )
            tokens = sequences.tokens
            old = torch.tensor([value for completion in completions for value in completion.log_probs])
            scores = grpo.normalize_rewards(hyperparameters, rewards, groups)
            advantages = grpo.estimate_advantages(hyperparameters, scores, tokens).advantages

            def loss(batch: MicroBatch, old=old, advantages=advantages, tokens=tokens):  # type: ignore[no-untyped-def]
                part = tokens.token_slice(batch.start, batch.stop)
                result = grpo.policy_loss(
                    hyperparameters,
                    batch.log_probs,
                    old[part],
                    advantages[part],
                    tokens.select(batch.start, batch.stop),
                )
                return result.loss.sum() / (SAMPLES * NEW_TOKENS), {}

            trainer.update(sequences, loss)
            times.append(time.perf_counter() - start)
    return times


def run_trl(steps: int, prompt_tokens: int) -> list[float]:
    """Seconds between the ends of TRL's steps."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    words = {f"w{index}": index for index in range(WORDS)} | {"<pad>": WORDS, "<eos>": WORDS + 1}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="w0", padding_side="left"
    )
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(words),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=WORDS,
            eos_token_id=WORDS + 1,
            bos_token_id=None,
        )
    )
    prompts = [" ".join(f"w{word}" for word in prompt) for prompt in draw_prompts(steps * GROUPS, prompt_tokens)]
    ends = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.perf_counter())

    def reward(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=output,
                per_device_train_batch_size=SAMPLES,
                num_generations=GROUP_SIZE,
                max_completion_length=NEW_TOKENS,
                generation_kwargs={"min_new_tokens": NEW_TOKENS},
                max_steps=steps,
                learning_rate=1e-3,
                beta=0.0,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                gradient_checkpointing=False,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return [end - start for start, end in itertools.pairwise(ends)]


SIDES = {"relax": run_relax, "trl": run_trl}


def measure(side: str, python: str, steps: int, prompt_tokens: int) -> list[float]:
    """Runs one side in a process of its own; the first two steps warm up and are dropped."""
    command = [python, __file__, "--side", side, "--steps", str(steps), "--prompt-tokens", str(prompt_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-2000:]}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=sys.executable, help="the interpreter that has TRL")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--steps", type=int, default=8, help="steps of one turn")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="length of the prompts")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(SIDES[arguments.side](arguments.steps, arguments.prompt_tokens)))
        return
    interpreters = {"relax": sys.executable, "trl": arguments.trl_python}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(arguments.rounds):
        for side, python in interpreters.items():
            times[side] += measure(side, python, arguments.steps, arguments.prompt_tokens)
    medians = {side: statistics.median(steps) for side, steps in times.items()}
    for side, median in medians.items():
        print(f"{side:6} {SAMPLES / median:7.0f} samples/s   {median:.3f} s a step (best {min(times[side]):.3f} s)")
    print(f"ratio  {medians['trl'] / medians['relax']:.2f}")


if __name__ == "__main__":
    main()
