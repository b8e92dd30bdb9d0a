"""Many runs compared, worlds whose truth is known, and what is told of them. Nothing of the method imports it."""
