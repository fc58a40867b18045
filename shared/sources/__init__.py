"""Where adapter files come from: one resolver class per URI scheme. Both services read sources by this code."""
