"""Stand-ins of compiled packages that a machine without a GPU lacks, so that SGLang can be imported: on PYTHONPATH.

Any attribute of such a module is a class that can be subclassed and used as a decorator; making one raises. Packages
are named by EVENROUTE_SGLANG_STUBS (comma-separated); one that is installed wins.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

NAMES = set(os.environ.get("EVENROUTE_SGLANG_STUBS", "torchvision,sgl_kernel").split(","))


class _Attributes(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _made(name)


def _made(name):
    def refuse(self, *_, **__):
        raise NotImplementedError(f"{name}: a stand-in of a package that this machine lacks")

    return _Attributes(name, (), {"__init__": refuse})


class _StandInModule(types.ModuleType):
    __path__ = ()
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _made(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _StandInModule(spec.name)

    def exec_module(self, module):
        return None


sys.meta_path.append(_Finder())
