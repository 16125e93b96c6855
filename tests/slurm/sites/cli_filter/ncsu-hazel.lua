-- "At submission", of a plugin that looks at a request when it is submitted: one for GPUs without a type
-- is rejected, and the half of an account that a partition does not take.
function refused(options)
    for _, name in ipairs({"gres", "gpus", "gpus-per-node", "gpus-per-task"}) do
        local wanted = options[name] or ""
        if string.find(wanted, "gpu:%d") or string.find(wanted, "^%d") then return "a type of GPU must be given" end
    end
    local account, partition = options["account"] or "", options["partition"] or "compute"
    if string.find(account, "_gpu$") and string.find(partition, "^compute") then
        return "an account that ends with _gpu is not for this partition"
    end
end
