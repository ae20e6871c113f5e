"""Cases, oracle, tolerances and the conformance suite: public, for backends of other packages."""
