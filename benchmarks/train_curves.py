"""Loss curves of one training, computed in several ways: precision, attention, compiled layers, replayed graphs.

    python benchmarks/train_curves.py --target SMOLLM2 --data gsm8k_train.jsonl fp32 bf16 bf16:anchored:compiled:graphs

A 5-layer draft of the target's shapes learns from the same batches every time. A way is a precision and options:
`anchored` (attention by kernels; otherwise dense), `compiled`, `graphs`, `seedN` (which initial weights; 0), `nearN`
(initial weights off by up to a rounding to bf16, drawn N-th: how far apart two ways may be without a cause).
Without --target the draft is SmolLM2's and learns to count: the ends are random and the features are a fixed random map
of the token that comes next.

Prints one JSON line a way (losses of the first steps, then means of 20), and what each is off the first one.
"""

import argparse
import copy
import json
import time
import traceback
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor
from train_gpu import FAILURES, SMOLLM2, release
from train_timing import LOCK, beside_others

from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.trainee import Computation, Draw, Work
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.features.packing import collate, pack_rows
from draftsmith.features.record import Record
from draftsmith.features.schema import TAPS
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.target import Target
from draftsmith.training.forward import DraftLoss, share_done
from draftsmith.training.graphs import BatchGraphs
from draftsmith.training.micro_batch import MicroBatch
from draftsmith.training.options import TrainOptions
from draftsmith.training.parallel import Parallel
from draftsmith.training.schedule import learning_rate
from draftsmith.training.update import Updater

LONGEST = 448


def documents_of(target: Target, data: str, count: int, device: str) -> list[Record]:
    """The first conversations of a file, cut to `LONGEST` tokens, with the target's features; answers are labelled."""
    records = []
    with open(data) as lines:
        for number, line in zip(range(count), lines, strict=False):
            texts = [message["content"] + "\n" for message in json.loads(line)["messages"][:2]]
            prompt, answer = (target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
            ids = torch.tensor((prompt + answer)[:LONGEST])
            places = torch.arange(len(ids), device=device)[None]
            found = target.forward(ids[None].to(device), places, tap_ids=SMOLLM2.target_layer_ids, final_state=False)
            mask = torch.arange(len(ids)) >= len(prompt)
            records.append(Record(f"document-{number}", ids, mask, {TAPS: found.taps[0].cpu()}))
    return records


def counting_documents(ends: TargetEnds, count: int) -> list[Record]:
    """Runs of numbers, whose features tell the token after each."""
    width = len(SMOLLM2.target_layer_ids) * ends.hidden_size
    maps = torch.randn(ends.hidden_size, width) / ends.hidden_size**0.5
    records = []
    for number in range(count):
        length = int(torch.randint(150, LONGEST, ()))
        ids = (int(torch.randint(1000, ())) + torch.arange(length + 1)) % 1000 + 100
        following = ends.embedding_weight[ids[1:]].float().cpu()
        features = following / following.std() @ maps + 0.1 * torch.randn(length, width)
        mask = torch.arange(length) >= 20
        records.append(Record(f"document-{number}", ids[:-1], mask, {TAPS: features.bfloat16()}))
    return records


class Curves:
    """The batches of a run of `steps` steps, and the losses of training on them."""

    def __init__(
        self, config: DraftConfig, ends: TargetEnds, records: Sequence[Record], arguments: argparse.Namespace
    ) -> None:
        self.config, self.ends, self.device = config, ends, torch.device(arguments.device)
        self.steps, self.options = arguments.steps, TrainOptions(lr=arguments.lr)
        until = self.steps if arguments.until is None else arguments.until
        self.method = algorithm("dflash")
        self.section = self.method.section(algorithm="dflash")
        maker = self.method.examples(config, self.section)
        rows = pack_rows([len(record.input_ids) for record in records], arguments.tokens_per_row)
        each = arguments.rows_per_step

        def batch(step: int) -> MicroBatch:
            taken = [[records[i] for i in rows[(each * step + k) % len(rows)]] for k in range(each)]
            packed = collate(taken, arguments.tokens_per_row)
            draw = Draw(seed=0, epoch=each * step // len(rows), most=arguments.anchors)
            return MicroBatch(packed, maker.examples(packed, draw), Work())

        self.batches = [batch(step) for step in range(until)]

    def draft(self, options: Sequence[str]) -> Draft:
        numbers = {word: int(option.removeprefix(word)) for option in options for word in ("seed", "near")
                   if option.startswith(word)}  # fmt: skip
        torch.manual_seed(numbers.get("seed", 0))
        draft = Draft.from_config(self.config)
        if "near" in numbers:
            torch.manual_seed(1000 + numbers["near"])
            with torch.no_grad():
                for parameter in draft.parameters():
                    parameter.mul_(1 + 2.0**-9 * (2 * torch.rand_like(parameter) - 1))
        return draft.to(self.device)

    def losses(self, way: str, until: int | None = None) -> Tensor:
        """[steps] float64, the loss of every step before its update; until: so many steps only."""
        precision, *options = way.split(":")
        how = Computation(
            self.device,
            torch.bfloat16 if precision == "bf16" else None,
            "anchored" if "anchored" in options else "dense",
            compile_layers="compiled" in options,
        )
        draft = self.draft(options)
        ends = copy.deepcopy(self.ends).to(self.device, torch.float32) if precision == "fp32" else self.ends
        loss = DraftLoss(draft, self.method.trainee(draft, ends, self.section, how), autocast=how.autocast)
        loss.train()
        parallel = Parallel(loss, "ddp", Accelerator(mixed_precision="no", cpu=self.device.type == "cpu"))
        updater = Updater(loss, parallel, self.options)
        graphs = BatchGraphs(parallel.forward, list(loss.parameters())) if "graphs" in options else None
        found = []
        for step, batch in enumerate(self.batches[:until]):
            updater.clear()
            progress = share_done(step, self.steps, self.device)
            if graphs is not None:
                numerator, denominator, _ = graphs.run(batch.to(self.device), progress)
            else:
                numerator, denominator, _ = parallel.forward(batch.to(self.device), progress)
                numerator.backward()
            rate = learning_rate(step, self.steps, self.options)
            updater.apply(numerator.detach().double(), denominator.double(), rate)
            found.append((numerator / denominator).detach())
        return torch.stack(found).double().cpu()


def rounded(numbers: Tensor, digits: int = 4) -> list[float]:
    return [round(number, digits) for number in numbers.tolist()]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ways", nargs="+")
    parser.add_argument("--target")
    parser.add_argument("--data")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--until", type=int, help="steps after which to stop (all)")
    parser.add_argument("--first", type=int, default=40, help="steps whose losses are printed one by one")
    parser.add_argument("--documents", type=int, default=160)
    parser.add_argument("--tokens-per-row", type=int, default=1200)
    parser.add_argument("--rows-per-step", type=int, default=2)
    parser.add_argument("--anchors", type=int, default=32, help="of a document")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--lock", help="a file, as for train_gpu.py: nothing is computed while others measure")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    LOCK.extend([] if arguments.lock is None else [arguments.lock])
    started = time.perf_counter()
    if arguments.target is not None:
        target = Target.load(arguments.target, device=arguments.device, dtype="bfloat16", fuse="off")
        ends, config = target.ends, SMOLLM2.replace(mask_token_id=16)
        records = documents_of(target, arguments.data, arguments.documents, arguments.device)
    else:
        torch.manual_seed(0)
        embedding = 0.1 * torch.randn(SMOLLM2.vocab_size, SMOLLM2.hidden_size, dtype=torch.bfloat16)
        ends, config = TargetEnds(embedding, embedding).to(arguments.device), SMOLLM2
        records = counting_documents(ends, arguments.documents)
    curves = Curves(config, ends, records, arguments)
    slots = curves.batches[0].examples.input_ids.numel()
    print(json.dumps({"ready_s": round(time.perf_counter() - started, 1), "slots": slots}), flush=True)
    found: dict[str, Tensor] = {}
    for way in arguments.ways:
        started = time.perf_counter()
        try:
            if "compiled" in way:
                curves.losses(way, 1)  # compiles; nobody is to wait for that
            with beside_others():
                found[way] = curves.losses(way)
        except FAILURES:
            print(json.dumps({"way": way, "error": traceback.format_exc()[-3000:]}), flush=True)
            continue
        means = found[way][: len(found[way]) // 20 * 20].view(-1, 20).mean(1)
        first = rounded(found[way][: arguments.first], 3)
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps({"way": way, "s": seconds, "first": first, "every20": rounded(means)}), flush=True)
        if "compiled" in way:
            release()
    first_way = next(iter(found), "")
    for way, losses in list(found.items())[1:]:
        difference = losses - found[first_way]
        means = difference[: len(difference) // 10 * 10].view(-1, 10).mean(1)
        largest = round(float(difference.abs().max()), 4)
        print(json.dumps({"way": way, "less": first_way, "largest": largest, "every10": rounded(means)}))


if __name__ == "__main__":
    main()
