"""Classes for frameworks, each with its own extra. They call a server over HTTP and load no model."""
