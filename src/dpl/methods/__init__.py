"""One file for each paper; a method registers itself by being here."""

from dpl.methods.registry import MethodInfo, get_method, list_methods, register

__all__ = ["MethodInfo", "get_method", "list_methods", "register"]
