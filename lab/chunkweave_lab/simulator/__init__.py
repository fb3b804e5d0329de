"""Replays request traces through the real tree, policies and queue, with times from a cost model."""
