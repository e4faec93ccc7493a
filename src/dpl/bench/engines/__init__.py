"""Engines that take a grid past one machine; each needs an extra of its own and is imported when it is asked for."""
