"""The recipe's `target` section."""

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.base.dtypes import DTYPES
from draftsmith.base.fields import PlaceField
from draftsmith.base.switch import Switch


class TargetOptions(BaseModel):
    """Which model is the target, and how it is loaded. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: PlaceField = Field(description="Hub id, local model directory, or path of a .gguf file.")
    dtype: str = Field(
        default="auto",
        description=f"auto (as the checkpoint says), {', '.join(DTYPES)}.",
        pattern=f"^(auto|{'|'.join(DTYPES)})$",
    )
    device: str = Field(default="auto", description="auto (cuda if there is one, else cpu), cpu, cuda, cuda:1 ...")
    revision: str | None = Field(default=None, description="Hub branch, tag or commit.")
    fuse: Switch = Field(
        default="auto",
        description="Join weights and run fused kernels when decoding: on, off, or auto (on a CUDA device, for the "
        "kinds of model that are known).",
    )
    trust_remote_code: bool = Field(default=False, description="Run model code that the checkpoint brings along.")
