"""Studies of many runs, testbeds with a known true reward, and reports. The method itself never imports it."""
