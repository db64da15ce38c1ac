"""Import torchdata without its deprecation warning, and without Hugging Face datasets."""

import importlib.util
import sys
import types
import warnings

__all__: list[str] = []

# torchdata imports Hugging Face's `datasets`, if installed, for the one function that one of its readers calls. That
# costs every process half a second and 60 MB, and prints a warning in notebooks without ipywidgets: import it on use.
_defers_datasets = "datasets" not in sys.modules and importlib.util.find_spec("datasets") is not None
if _defers_datasets:
    sys.modules["datasets"] = None  # type: ignore[assignment]  # importing it raises ImportError, which torchdata handles

with warnings.catch_warnings():
    # torchdata 0.9 tells every importer that DataPipes and DataLoader2 are deprecated. It is the last line that has
    # them, kdpipes is pinned to it for that reason, and its users cannot act on the message.
    warnings.filterwarnings(
        "ignore", message=r"\s*#+\s*WARNING!\s*The 'datapipes', 'dataloader2' modules are deprecated"
    )
    from torchdata.datapipes.iter.load import huggingface

if _defers_datasets:
    del sys.modules["datasets"]
    huggingface.datasets = types.SimpleNamespace(
        load_dataset=lambda *args, **kwargs: importlib.import_module("datasets").load_dataset(*args, **kwargs)
    )
