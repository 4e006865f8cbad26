"""Stand-ins, in every process of SGLang, for modules that it imports and does not call for these models on CPUs.

`sgl_kernel` has only builds for GPUs in package registries, and torchvision none for torch's CPU build. Without them
SGLang computes in plain torch. Whatever of a stand-in is called raises.
"""

import importlib.abc
import importlib.machinery
import sys
import types

NAMES = ("sgl_kernel", "torchvision", "IPython", "soundfile", "gguf")


class Missing(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name

    def __call__(cls, *given, **named):
        raise RuntimeError(f"{cls.__module__}.{cls.__name__}: called, but it is a stand-in")


class StandIn(types.ModuleType):
    __path__ = ()
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(name, (), {"__module__": self.__name__})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
