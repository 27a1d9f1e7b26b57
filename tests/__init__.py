"""The tests. Names such as case B1 are those of public faults, which `CASES.md` lists with the tests that hold them."""
