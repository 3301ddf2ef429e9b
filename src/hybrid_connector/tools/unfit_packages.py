"""How is vLLM imported beside packages whose compiled part does not fit this torch?

PyPI's torchvision and torchaudio are CUDA builds. Beside a CPU torch their import fails, and vLLM's with them, although
nothing here ever calls them. Where everything fits, this changes nothing.
"""

import importlib
import sys


def hide_unfit_packages() -> None:
    """Let imports of packages that do not fit this torch fail as if they were not installed. Call before vLLM's import.

    torchvision is not hidden: some models' modules import its Python part. That refers to two operators' schemas, which
    are added; nothing ever calls them.
    """
    for name in ("torchaudio", "torchcodec"):
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):
            sys.modules[name] = None  # type: ignore[assignment]
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        import torch

        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for schema in (
            "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        ):
            library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            library.define(schema)  # type: ignore[no-untyped-call]
            _KEPT_LIBRARIES.append(library)
        importlib.import_module("torchvision")


_KEPT_LIBRARIES: list[object] = []
"""torch forgets an operator when its library object is collected."""
