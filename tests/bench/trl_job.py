"""TRL's side of the comparison, in its environment: `python -m torch.distributed.run … tests.bench.trl_job JOB`.

    the job (model, prompts, settings) ─▶ GRPOTrainer ─▶ job["steps_file"]: time and results of each step

On a CPU the trainer generates with transformers; `NOTES` in against_trl.py says why not with vLLM. On a GPU it
generates with vLLM in its own process. Imports only the rewards of Slipstream.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from learner.rewards.builtin.text import last_number
from tests.bench.good_share import even_share, good_share

REWARDS = {"even_share": even_share, "good_share": good_share, "last_number": last_number}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    cores, num_ranks, rank = sorted(os.sched_getaffinity(0)), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    os.sched_setaffinity(0, cores[rank::num_ranks])
    os.environ["OMP_NUM_THREADS"] = str(len(cores[rank::num_ranks]))
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    class Clock(TrainerCallback):
        """Records every step when its metrics are logged, at its end. Evaluations do not count as time."""

        def __init__(self) -> None:
            self.steps: list[dict[str, Any]] = []
            self.evaluations: list[dict[str, float]] = []
            self.started = 0.0

        @property
        def elapsed_s(self) -> float:
            return time.monotonic() - self.started

        def on_train_begin(self, *arguments: Any, **more: Any) -> None:
            self.started = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **more: Any) -> None:
            if "reward" in logs:
                self.steps.append(
                    {
                        "ended_s": self.elapsed_s,
                        "version": state.global_step - 1,
                        "completion_length_mean": logs["completions/mean_length"],
                        "reward_mean": logs["reward"],
                        "lengths": lengths.pop() if lengths else [],
                        "mismatch": logs.get("sampling/sampling_logp_difference/mean"),
                    }
                )

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if job.get("held_out") and state.global_step % job["evaluate_every"] == 0:
                began_s = self.elapsed_s
                reward = held_out_reward(trainer.model, tokenizer, job)
                self.evaluations.append({"step": state.global_step, "elapsed_s": began_s, "reward": reward})
                self.started += self.elapsed_s - began_s
                control.should_training_stop = reward >= job["target"]

    lengths: list[list[int]] = []
    """Of the completions of the step, which are rated in one call."""
    reward_of = REWARDS[job["reward"]]

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths[:] = [[len(ids) for ids in completion_ids]]
        return reward_of(completion_ids=completion_ids, **columns)

    rows = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    clock = Clock()
    trainer = GRPOTrainer(
        model=job["model"], reward_funcs=reward, args=settings(job, num_ranks),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    if rank == 0:
        found = {"processes": num_ranks, "threads": torch.get_num_threads(), "steps": clock.steps}
        if job["device"] == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        Path(job["steps_file"]).write_text(json.dumps(found | {"evaluations": clock.evaluations}))


def settings(job: dict[str, Any], num_ranks: int) -> Any:
    """Return the job as a config of TRL."""
    from trl import GRPOConfig

    num_rows = job["groups_per_step"] * job["num_completions"] // num_ranks
    in_vllm = {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": job["vllm_share"],
        "vllm_max_model_length": job["max_model_len"],
    }  # fmt: skip
    return GRPOConfig(
        output_dir=str(Path(job["steps_file"]).parent / "trl"), save_strategy="no", report_to="none", disable_tqdm=True,
        logging_steps=1, seed=job["seed"], use_cpu=job["device"] == "cpu", bf16=job["bf16"],
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"}, max_steps=job["steps"],
        per_device_train_batch_size=job["micro_batch_rows"],
        gradient_accumulation_steps=num_rows // job["micro_batch_rows"],
        num_generations=job["num_completions"], max_completion_length=job["max_tokens"],
        temperature=1.0, top_p=1.0, top_k=0, cache_implementation=job["cache"], torch_compile=job["compile"],
        beta=0.0, num_iterations=1, epsilon=job["clip_low"], epsilon_high=job["clip_high"], loss_type="dapo",
        scale_rewards="group", importance_sampling_level="token", mask_truncated_completions=False,
        learning_rate=job["learning_rate"], lr_scheduler_type="constant", warmup_steps=0,
        max_grad_norm=job["max_grad_norm"],
        adam_beta1=job["beta1"], adam_beta2=job["beta2"], weight_decay=job["weight_decay"],
        **(in_vllm if job["device"] == "cuda" else {}),
    )  # fmt: skip


def held_out_reward(model: Any, tokenizer: Any, job: dict[str, Any]) -> float:
    """Return the mean reward of greedy answers, in bfloat16 if training uses it."""
    import torch

    rows = [json.loads(line) for line in Path(job["held_out"]).read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=job["bf16"]):
        outputs = model.generate(**inputs, max_new_tokens=job["max_tokens"], do_sample=False)
    model.train()
    texts = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = REWARDS[job["reward"]](completions=texts, answer=[row["answer"] for row in rows])
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    main()
