"""Answers to prompts by the target itself: what a draft is best trained on."""

from draftsmith.regenerate.options import EndpointOptions, RegenerateOptions
from draftsmith.regenerate.run import RegenerateReport, check_answers, regenerate, unanswered

__all__ = ["EndpointOptions", "RegenerateOptions", "RegenerateReport", "check_answers", "regenerate", "unanswered"]
