"""What there is to do: which documents are trained on, in how many steps."""

from dataclasses import dataclass

from draftsmith.errors import DraftsmithError
from draftsmith.training.documents import check_fit
from draftsmith.training.evaluation import split_documents
from draftsmith.training.options import TrainOptions
from draftsmith.training.plan import StepPlan
from draftsmith.training.source import FeatureSource


@dataclass(frozen=True)
class Steps:
    """documents: those to train on, by number, in the order that `plan` numbers them; held_out: the others; total: the
    optimiser steps of the run."""

    documents: list[int]
    held_out: list[int]
    plan: StepPlan
    total: int


def plan_steps(source: FeatureSource, options: TrainOptions) -> Steps:
    """The steps that these options make of these documents.

    Raises `DraftsmithError` where a document does not fit into a row, nothing is left to train on, or nothing is
    supervised.
    """
    check_fit(source, options.tokens_per_row)
    documents, held_out = split_documents(source.sample_ids, options.eval_share)
    if not any(source.supervised[i] for i in documents):
        raise DraftsmithError(
            f"{source.place}: no supervised token in {len(documents)} training documents, so there is nothing "
            "to learn; look at the loss masks (`draftsmith inspect`)"
        )
    plan = StepPlan(
        [source.lengths[i] for i in documents],
        [source.sample_ids[i] for i in documents],
        tokens_per_row=options.tokens_per_row,
        rows_per_step=options.rows_per_step,
        rows_per_forward=options.rows_per_forward,
        seed=options.seed,
    )
    total = options.max_steps or sum(plan.steps_in(epoch) for epoch in range(options.epochs))
    return Steps(documents, held_out, plan, total)
