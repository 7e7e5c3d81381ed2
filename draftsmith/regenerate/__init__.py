"""Answers to prompts by the target itself: what a draft is best trained on."""

from draftsmith.regenerate.endpoint import EndpointOptions
from draftsmith.regenerate.run import RegenerateOptions, RegenerateReport, check_answers, regenerate

__all__ = ["EndpointOptions", "RegenerateOptions", "RegenerateReport", "check_answers", "regenerate"]
