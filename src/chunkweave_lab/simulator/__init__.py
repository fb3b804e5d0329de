"""Replays request traces through the tree, the policies and the queue that serve them, with a cost model as clock."""
