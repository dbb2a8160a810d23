"""Layout rules: for each operator, how its results lie when its arguments lie so."""
