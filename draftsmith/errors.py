"""The one base class of every error that draftsmith raises for something the user can mend."""


class DraftsmithError(Exception):
    """A fault in the user's input, data or environment.

    The message names the thing, the value found, what is allowed, and the fix. The command line prints it without a
    traceback and exits with status 1; anything that is not a `DraftsmithError` is a defect of draftsmith and keeps its
    traceback. Rooms may derive their own classes where a caller needs to tell them apart.
    """
