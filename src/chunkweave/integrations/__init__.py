"""Classes for frameworks, each with an extra of its own; they talk to a server over HTTP and load no model."""
