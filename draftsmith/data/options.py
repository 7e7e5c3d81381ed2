"""The recipe's `data` section."""

from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.base.fields import PathField, PlaceField
from draftsmith.errors import DraftsmithError

SHIPPED_PROMPTS = "shipped"
TEMPLATE_SYSTEM_PROMPT = "template"


class DataOptions(BaseModel):
    """Where conversations come from and how they become tokens.

    The template settings hold for training and for generation alike, so that a draft is trained on what is served.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    conversations: PathField | None = Field(default=None, description="Training conversations: a JSONL file.")
    prompts: PlaceField | None = Field(
        default=None,
        description=f'Prompts to answer: a JSONL file, "{SHIPPED_PROMPTS}" for those of the package, or a data set by '
        "name that has rows to learn from.",
    )
    chat_template: PathField | None = Field(
        default=None, description="A Jinja chat template to use in place of the tokenizer's own."
    )
    system_prompt: str = Field(
        default=TEMPLATE_SYSTEM_PROMPT,
        description=f'"{TEMPLATE_SYSTEM_PROMPT}" leaves it to the template (which may add a default one); any other '
        "text becomes the system message of conversations that have none of their own.",
    )
    enable_thinking: bool | None = Field(
        default=None, description="Given to the chat template as `enable_thinking`; unset: the template's default."
    )
    turns: Literal["together", "apart"] = Field(
        default="together",
        description="One sample for a whole conversation, or one for each answer with the turns before it. Templates "
        "that rewrite earlier turns (dropping their reasoning, say) need `apart`.",
    )
    max_length: int = Field(default=2048, ge=2, description="The most tokens of one sample.")
    overlong: Literal["cut", "skip", "error"] = Field(
        default="cut", description="What happens to a sample of more than `max_length` tokens."
    )
    template_mismatch: Literal["error", "skip"] = Field(
        default="error",
        description="What happens to a conversation whose answers cannot be told apart in the rendered template.",
    )

    @cached_property
    def chat_template_text(self) -> str | None:
        """The text of the `chat_template` file, None where none is configured. DraftsmithError: it cannot be read."""
        if self.chat_template is None:
            return None
        try:
            return self.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DraftsmithError(
                f"data.chat_template: cannot read {self.chat_template} ({error}); give a file with a Jinja template"
            ) from error
