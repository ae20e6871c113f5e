"""What mechanisms are built from: base classes, the example, explanations, costs of parts."""
