"""A run as Kubernetes objects: pure rendering, from the plan, the cluster profile and what the user asks for."""
