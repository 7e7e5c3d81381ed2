"""A plug-in for vLLM's server: the first word of an answer is its reasoning, so that any model has some."""

from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.granite_reasoning_parser import GraniteReasoningParser


@ReasoningParserManager.register_module("first_word")
class FirstWord(GraniteReasoningParser):
    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str, str]:
        reasoning, _, content = model_output.partition(" ")
        return reasoning, content
