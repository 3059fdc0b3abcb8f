"""Compiled forward passes of the embedded engine: all but the cache and the routed experts, in one piece.

A process of low priority compiles a model once (`build`); the machine's cache keeps the result (`store`).
"""
