-- Deals one router its share of a tenant's buckets, and takes back what it had of the last deal.
--
-- A bucket holds one minute's quota and refills evenly; it may owe as much. What routers hold is
-- no longer in it, so all of them together never have more than there is. A router says how much
-- it spent since it began, not since the last call: an answer that was lost changes nothing.
--
-- KEYS  1 hash of the tenant: at, level:<bucket>, and per router "seen spent held spent held"
-- ARGV  1 router  2 forget routers silent for so many ms  3 lease in ms  4 "1" = leaves
--       5 routers that it last saw, for when the hash is gone
--       then for each bucket: quota per minute (0 = none), spent, spent as of the last answer
--       that came, wanted at least, what the router knows is left ("" = nothing)
-- Returns routers seen, then for each bucket: granted, left in all.
local me, forget_ms, lease_ms = 'router:' .. ARGV[1], tonumber(ARGV[2]), ARGV[3]
local is_leaving = ARGV[4] == '1'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local at, level, held_by_others, mine, num_routers = now, {}, { 0, 0 }, nil, 1
local stored = redis.call('HGETALL', KEYS[1])
for i = 1, #stored, 2 do
  local name, value = stored[i], stored[i + 1]
  if name == 'at' then
    at = math.min(tonumber(value), now)
  elseif name == 'level:1' or name == 'level:2' then
    level[tonumber(string.sub(name, 7))] = tonumber(value)
  elseif string.sub(name, 1, 7) == 'router:' then
    local numbers = {}
    for number in string.gmatch(value, '%S+') do table.insert(numbers, tonumber(number)) end
    if name == me then
      mine = numbers
    elseif now - numbers[1] > forget_ms then
      redis.call('HDEL', KEYS[1], name)
    else
      num_routers = num_routers + 1
      for bucket = 1, 2 do
        held_by_others[bucket] = held_by_others[bucket] + numbers[2 * bucket + 1]
      end
    end
  end
end

if #stored == 0 then num_routers = math.max(1, tonumber(ARGV[5])) end

local answer, entry = { tostring(num_routers) }, string.format('%.0f', now)
for bucket = 1, 2 do
  local first = 5 * bucket + 1
  local quota, spent = tonumber(ARGV[first]), tonumber(ARGV[first + 1])
  local granted, left = 0, 0
  if quota > 0 then
    local news, held = spent - tonumber(ARGV[first + 2]), 0
    if mine then news, held = spent - mine[2 * bucket], mine[2 * bucket + 1] end
    -- A hash that is gone: what the router knows outranks that nothing is stored.
    local before = level[bucket] or tonumber(ARGV[first + 4]) or quota
    local pool = before + quota * (now - at) / 60000 + held - news
    pool = math.max(-quota, math.min(quota - held_by_others[bucket], pool))
    if pool > 0 and not is_leaving then
      local share = math.max(math.floor(pool / num_routers), tonumber(ARGV[first + 3]))
      granted = math.min(math.floor(pool), share)
    end
    left = pool + held_by_others[bucket]
    redis.call('HSET', KEYS[1], 'level:' .. bucket, string.format('%.3f', pool - granted))
  end
  entry = entry .. string.format(' %.0f %.0f', spent, granted)
  table.insert(answer, string.format('%.0f', granted))
  table.insert(answer, string.format('%.3f', left))
end
redis.call('HSET', KEYS[1], 'at', string.format('%.0f', now))
if is_leaving then
  redis.call('HDEL', KEYS[1], me)
else
  redis.call('HSET', KEYS[1], me, entry)
end
redis.call('PEXPIRE', KEYS[1], lease_ms)
return answer
