"""What must stay before what: dependencies of data, storage, lifetimes and signals."""
