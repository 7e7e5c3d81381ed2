"""Runs vLLM on what draftsmith wrote: jobs come and answers go as files. Nothing of draftsmith is imported here.

    python vllm_generate.py JOBS

JOBS holds one `NAME.json` a job: the keywords of `vllm.LLM` (`llm`), prompts as lists of token ids, the number of new
tokens and stop tokens. Written beside each: `NAME.answers.json` with the tokens of every answer and what vLLM counted
of its drafts. With TRITON_INTERPRET=1 Triton's interpreter is taken for a backend of the CPU, which vLLM's second model
runner asks for.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

# Before vLLM is imported: one process, which a failing job ends with its own traceback.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def interpret_triton() -> None:
    """Registers the interpreter as Triton's CPU backend, and has it take masks of other integers than bool."""
    import numpy as np
    import triton.language as tl
    from triton.backends import Backend, backends
    from triton.runtime import interpreter

    class Driver:
        @classmethod
        def is_active(cls) -> bool:
            return True

    class Compiler:
        pass

    backends["cpu"] = Backend(compiler=Compiler, driver=Driver)

    def as_bool(mask: Any) -> Any:
        if mask.data.dtype == np.bool_:
            return mask
        return interpreter.TensorHandle(mask.data.astype(np.bool_), tl.int1)

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    builder.create_masked_load = lambda self, pointers, mask, *rest: load(self, pointers, as_bool(mask), *rest)
    builder.create_masked_store = lambda self, pointers, value, mask, *rest: store(
        self, pointers, value, as_bool(mask), *rest
    )


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One engine, and its answers to all prompts at once."""
    from vllm import LLM, SamplingParams

    llm = LLM(enforce_eager=True, disable_log_stats=False, **job["llm"])
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["stop_token_ids"], detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    counters = {
        metric.name: getattr(metric, "value", getattr(metric, "values", None))
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }
    return {"token_ids": [list(answer.outputs[0].token_ids) for answer in answers], "counters": counters}


def main(jobs: Path) -> None:
    """Every job below `jobs`."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpret_triton()
    for file in sorted(jobs.glob("*.json")):
        answers = run(json.loads(file.read_text()))
        file.with_suffix(".answers.json").write_text(json.dumps(answers))
        gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
